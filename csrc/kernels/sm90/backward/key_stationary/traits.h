// Traits and shared memory of the key-stationary backward kernel.
#pragma once

#include <type_traits>

#include "kernels/config/key_stationary.h"
#include "kernels/schedule/schedule.cuh"
#include "kernels/score/score_tile.cuh"
#include "kernels/sm90/backward/key_stationary/arguments.h"
#include "kernels/sm90/backward/key_stationary/dq_stages.h"
#include "kernels/sm90/kernel.cuh"
#include "tile/sm90/gemm.h"
#include "tile/sm90/pipeline.h"

namespace flash_attn_ext::sm90 {

// An iteration of a key tile: one of the query tiles that see it.
struct alignas(16) QueryIteration {
  int query_tile;                              // of the sequence
  int head;                                    // query head
  int accumulator;                             // its index in the workspace
  int rank;                                    // how many contributors come before
  bool is_last;                                // whether the key tile is the last contributor
  bool ends_tile;                              // whether it is the key tile's last iteration
  bool is_partial[LoopOrder::kKeyWarpgroups];  // whether scores are masked by position
};

// The same where a mask leaves iterations out.
struct MaskedIteration : QueryIteration {
  int mask_tile;  // MaskIterations::Entry, and so is_hidden
  bool is_hidden[LoopOrder::kKeyWarpgroups];
};

// The same with ALiBi.
template <class Iteration>
struct WithAlibi : Iteration {
  int first_diagonal;       // the diagonal key of the tile's first query
  float slope;              // times log2(e); its negative with statistics for later keys
  bool may_cross_diagonal;  // some keys may be later than a query, and others earlier
};

// The same with a key bias.
struct KeyBiasIteration : QueryIteration {
  float reference;      // KeyBiasReference
  float shift;          // of the exponents
  bool ignores_scores;  // the reference is dominant
  const void* of_head;  // its bias
};

// The begins and ends of an iteration's intervals (MaskIterations::bounds).
struct alignas(16) IntervalBounds {
  int32_t of_queries[2 * attention::RowIntervals::kMost][LoopOrder::kQueries];
};

template <class ElementType, KeyStationaryConfig kConfigValue>
struct KeyStationaryTraits {
  using Element = ElementType;
  static constexpr KeyStationaryConfig kConfig = kConfigValue;
  static constexpr HeadDims kDims = kConfig.dims;
  static constexpr KeyStationaryTile kTile = kConfig.tile;
  static constexpr bool kMasked = has_mask(kConfig.score) || kConfig.hides_keys;
  static constexpr bool kKeyBias = kConfig.score == ScoreMode::kKeyBias || kConfig.score == ScoreMode::kKeyBiasDropout;
  static constexpr bool kSumsDscores = kConfig.sums_dscores;
  static_assert(!kSumsDscores || (kKeyBias && kConfig.adds_statistics));
  using KeyBiasElement = std::conditional_t<kSumsDscores, float, Element>;
  static constexpr bool kDrops = always_drops(kConfig.score);
  static_assert(!kDrops || !kConfig.adds_statistics);
  static constexpr bool kBiased = reads_bias_boxes(kConfig.score);
  static_assert(kBiased || !kConfig.hides_keys);
  // The bias occupies the stage of dS, so the draws need memory of their own.
  static constexpr bool kHasDraws = kBiased && kDrops;
  static constexpr bool kAlibi = adds_alibi(kConfig.score);
  static_assert(!kAlibi || kConfig.adds_statistics);
  static constexpr bool kCapped = caps_scores(kConfig.score);
  static_assert(!kCapped || !kConfig.adds_statistics);
  static constexpr bool kChunked = kConfig.chunks_queries;
  static_assert(!kChunked || kConfig.score == ScoreMode::kScaleOnly);
  using Arguments = std::conditional_t<kChunked, ChunkedKeyStationaryArguments, KeyStationaryArguments>;
  using Work =
      std::conditional_t<kChunked, ChunkedKeyTileWork, std::conditional_t<kMasked, MaskedKeyTileWork, KeyTileWork>>;
  FLASH_HOST_DEVICE static uint32_t num_work_tiles(const Arguments& args) {
    if constexpr (kMasked) {
      return num_masked_work_tiles(args);
    } else {
      return args.num_work_tiles();
    }
  }
  static constexpr bool kKeepsShift = keeps_shift<Element>(kConfig.adds_statistics);
  // The last step runs the code of the others, and issues a wasted GEMM. Code of its own would have to be fetched for
  // each key tile (docs/kernels/log/sm90_backward.md, "Head dims up to 128").
  static constexpr bool kOneStep = kMasked && kTile.keys_in_registers;
  static constexpr int kKeys = LoopOrder::kKeys;
  static constexpr int kQueries = LoopOrder::kQueries;
  static constexpr int kWarpgroups = LoopOrder::kKeyWarpgroups;
  static constexpr int kThreads = tile::kWarpgroupSize * (kWarpgroups + 2);
  static_assert(kKeys == kWarpgroups * tile::kWarpgroupRows && kQueries == tile::kWarpgroupRows);
  // A warpgroup that asks for more registers than the others leave would wait forever.
  static_assert(kTile.producer_registers + kWarpgroups * kTile.key_registers + kTile.dq_registers <= 512);

  using QTile = tile::SmemTile<Element, kQueries, kDims.qk>;
  using DoutTile = tile::SmemTile<Element, kQueries, kDims.v>;
  using KTile = tile::SmemTile<Element, kKeys, kDims.qk>;
  using VTile = tile::SmemTile<Element, kKeys, kDims.v>;
  using DscoreTile = tile::SmemTile<Element, kQueries, kKeys>;
  using Scores = tile::WarpgroupAccumulator<kQueries>;  // rows are keys
  // The statistics of a query tile (KeyStationaryWorkspace).
  using AugmentedColumns = KeyStationaryWorkspace::AugmentedColumns<Element>;
  using Statistics = std::conditional_t<kConfig.adds_statistics, AugmentedColumns[2], float[kBiased ? 3 : 2][kQueries]>;

  static constexpr int kDqSlices = kDims.qk / kTile.dq_columns;  // of an iteration
  static constexpr int kDqSliceFloats = kQueries * kTile.dq_columns;
  static constexpr int kDqStageFloats = kConfig.pre_signals_dq ? kDqSliceFloats : kDqSlices * kDqSliceFloats;
  using DqPipeline = std::conditional_t<kConfig.pre_signals_dq, PreSignalledDqPipeline, WholeDqPipeline>;

  using Where = ScoreTile<Rows::kKeys, Scores>;
  using OwnIteration =
      std::conditional_t<kMasked, MaskedIteration, std::conditional_t<kKeyBias, KeyBiasIteration, QueryIteration>>;
  using Iteration = std::conditional_t<kAlibi, WithAlibi<OwnIteration>, OwnIteration>;
};

// Named barriers. Barrier 0 is __syncthreads.
struct KeyStationaryBarrier {
  enum : int {
    kKeyWarpgroup = 1,  // of each key warpgroup: add its index
    kDqWarpgroup = kKeyWarpgroup + LoopOrder::kKeyWarpgroups
  };
};

// Synchronises the threads of a key warpgroup.
__device__ __forceinline__ void sync_key_warpgroup(int warpgroup) {
  ptx::sync_named(KeyStationaryBarrier::kKeyWarpgroup + warpgroup, tile::kWarpgroupSize);
}
// The same for the dQ warpgroup.
__device__ __forceinline__ void sync_dq_warpgroup() {
  ptx::sync_named(KeyStationaryBarrier::kDqWarpgroup, tile::kWarpgroupSize);
}

template <class Traits>
struct KeyStationaryShared {
  static constexpr int kComputingWarps = 4 * Traits::kWarpgroups;
  static constexpr int kDqWarps = 4;
  static constexpr int kWorkStages = 2;
  static constexpr int kStages = Traits::kConfig.tile.q_stages;  // of what an iteration reads, and of dS
  static constexpr int kKeyStages = Traits::kConfig.tile.kv_stages;
  using QueryState = tile::PipelineState<kStages>;
  // An iteration's description is written when a stage of Q is free. The dQ warpgroup is the last to read it, when it
  // takes dS from a stage. In between there are no more iterations than stages of both.
  static constexpr int kIterations = 2 * kStages;

  typename Traits::KTile k[kKeyStages];
  typename Traits::VTile v[kKeyStages];
  typename Traits::QTile q[kStages];
  typename Traits::DoutTile dout[kStages];
  typename Traits::DscoreTile dscores[kStages];
  alignas(128) float dq[kDqStages][Traits::kDqStageFloats];
  alignas(128) typename Traits::Statistics statistics[kStages];
  typename Traits::Work work[kWorkStages];
  typename Traits::Iteration iterations[kIterations];
  PendingSum pending[kDqReducers];
  tile::PipelineBarriers<kStages> q_pipeline;  // its empty barriers also stand for dO
  ptx::Barrier dout_full[kStages];             // also counts the bias
  tile::PipelineBarriers<kKeyStages> k_pipeline;
  tile::PipelineBarriers<kKeyStages> v_pipeline;
  tile::PipelineBarriers<kStages> dscore_pipeline;
  typename Traits::DqPipeline dq_pipeline;
  tile::PipelineBarriers<kWorkStages> work_pipeline;
  ptx::Barrier may_fetch_work;       // all copies of a key tile have been issued
  int arrived[Traits::kWarpgroups];  // combine_partials
  struct None {};
  [[no_unique_address]] std::conditional_t<Traits::kMasked, IntervalBounds[kStages], None> bounds;
  using Draws = uint32_t[kStages][kComputingWarps][tile::kWarpSize];
  [[no_unique_address]] std::conditional_t<Traits::kHasDraws, Draws, None> draws;
  using Sums = float[kComputingWarps][Traits::Scores::kThreadRows][tile::kWarpSize];
  [[no_unique_address]] std::conditional_t<Traits::kSumsDscores, Sums, None> dbias_of_keys;

  __device__ __forceinline__ typename Traits::Iteration& iteration(const QueryState& state) {
    return iterations[state.parity * kStages + state.stage];
  }

  __device__ __forceinline__ void init() {
    q_pipeline.init(kComputingWarps);
    for (auto& barrier : dout_full) ptx::init_barrier(barrier, 1);
    k_pipeline.init(kComputingWarps + kDqWarps);
    v_pipeline.init(kComputingWarps);
    dscore_pipeline.init(kDqWarps, kComputingWarps);
    dq_pipeline.init(kDqWarps);
    work_pipeline.init(kComputingWarps + kDqWarps + 1);
    ptx::init_barrier(may_fetch_work, 1);
    ptx::fence_barrier_init();
  }
};

}  // namespace flash_attn_ext::sm90
