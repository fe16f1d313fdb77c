// Arguments, traits and shared memory of the two-pass backward kernels, and the workspace through which these hand
// results on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "attention/params.h"
#include "kernels/common/repair/repair.h"
#include "kernels/config/two_pass.h"
#include "kernels/schedule/materialised_tiles.h"
#include "kernels/schedule/schedule.cuh"
#include "kernels/score/bias_mask.cuh"
#include "kernels/score/score_tile.cuh"
#include "kernels/sm90/backward/two_pass/seen_tiles.h"
#include "kernels/sm90/kernel.cuh"
#include "kernels/sm90/tensor_map.h"
#include "tile/sm90/gemm.h"
#include "tile/sm90/pipeline.h"

namespace flash_attn_ext::sm90 {

// Statistics are in tiles of queries. The tiles of a head are consecutive, and so are the heads. A packed sequence
// begins at a tile of its own.
struct TwoPassWorkspace {
  float* statistics;  // for each tile: its queries' LSEs, their deltas, the residuals of the LSEs (QueryTileStatistics)
  void* scores;       // materialised tiles of P, then those of dS (MaterialisedTiles)
  uint8_t* dq_nan_flags;
  uint8_t* dkdv_nan_flags;
  uint32_t* work_counters;  // one for each kernel of each launch
  float* key_sums;          // for each key tile of a launch: partial dK / scale or dV of earlier query chunks
  float* query_sums;        // for each row of a launch, and column part of dQ: partial dQ / scale of key chunks
  int key_tiles_of_matrix;
  int tiles_of_head;
  int num_work_counters;

  __device__ __forceinline__ static int first_tile(const attention::AttentionParams& p,
                                                   const attention::Sequence& sequence) {
    const auto batch = static_cast<int>(sequence.batch);
    if (p.sequences.cu_seqlens_q != nullptr)
      return static_cast<int>(sequence.query_begin) / MaterialisedTiles::kRows + batch;
    return batch * MaterialisedTiles::num_tiles(p.sequences.max_seqlen_q);
  }
  __device__ __forceinline__ float* statistics_of(int64_t tile) const {
    return statistics + tile * MaterialisedTiles::kStatistics * MaterialisedTiles::kRows;
  }
  // The flag of a warp's 16 rows of a query tile.
  template <class Work>
  __device__ __forceinline__ uint8_t& dq_nan_flag(const attention::AttentionParams& p, const Work& work, int tile,
                                                  int warp) const {
    const int tiles = MaterialisedTiles::num_tiles(p.sequences.max_seqlen_q);
    const int64_t pair = int64_t{work.key_head} * p.batch + work.batch;
    const int64_t head = pair * p.queries_per_key_head() + work.head_of_group;
    return dq_nan_flags[common::query_flag_index(head, tiles, tile) * 4 + warp];
  }
};

// Which gradients the GEMM kernel computes: dK, dV or both. A work tile computes one of them.
struct WantedGradients {
  bool dk;
  bool dv;
  FLASH_HOST_DEVICE int count() const { return dk + dv; }
  // The column parts of all of them.
  int count_parts(const attention::BackwardParams& p) const {
    return (dk ? num_column_parts(p.head_dim_qk) : 0) + (dv ? num_column_parts(p.head_dim_v) : 0);
  }
};

struct TwoPassArguments {
  TmaDescriptor q;  // all TMA boxes have MaterialisedTiles::kRows rows
  TmaDescriptor k;
  TmaDescriptor v;
  TmaDescriptor dout;
  BiasDescriptor bias;  // only of kernels for a bias and a mask
  attention::BackwardParams params;
  TwoPassWorkspace workspace;
  MaterialisedTiles tiles;
  Schedule schedule;        // of this kernel launch
  uint32_t* work_counters;  // of this kernel launch; 0 when it starts
  WantedGradients wanted;
  float scale_log2e;  // scale * log2(e)
  bool scales_lse;    // statistics hold LSE * log2(e), because scores are only scaled, or also hidden by a mask

  // The index of a query head among those of the launch.
  __device__ __forceinline__ int head_of_launch(const attention::Sequence& sequence, int key_head,
                                                int head_of_group) const {
    return tiles.matrix(params, sequence, key_head) * static_cast<int>(schedule.group) + head_of_group;
  }
};

// Traits of the dQ kernel. kKeyChunksValue: whether a launch leaves partial dQ to the next one. Kernels that do not
// spill less.
template <class ElementType, TwoPassConfig kConfigValue, bool kKeyChunksValue>
struct TwoPassDqTraits {
  using Element = ElementType;
  static constexpr TwoPassConfig kConfig = kConfigValue;
  static constexpr bool kKeyChunks = kKeyChunksValue;
  static constexpr HeadDims kDims = kConfig.dims;
  static constexpr bool kStagesBiasMask = kConfig.score == ScoreMode::kGeneric;  // each warp stages its bias and mask
  static constexpr bool kHasOnlyBits = kConfig.score == ScoreMode::kGenericWithoutBias;
  static constexpr bool kGeneric =
      kStagesBiasMask || kHasOnlyBits || kConfig.score == ScoreMode::kGenericWithoutBiasMask;
  static constexpr bool kHasBoxes = kConfig.score == ScoreMode::kBiasMask;  // TMA loads a bias beside K
  static constexpr bool kHasBits = kHasBoxes || kHasOnlyBits || kConfig.score == ScoreMode::kMask;
  static constexpr bool kHasBias = kHasBoxes || kStagesBiasMask;
  static constexpr bool kSkipsTiles = kHasBits || kStagesBiasMask;  // skips key tiles that a mask hides entirely
  static constexpr int kRows = MaterialisedTiles::kRows;            // queries of a warpgroup, and keys of a key tile
  static constexpr int kWarpgroups = 2;
  static constexpr int kQueries = kWarpgroups * kRows;
  static_assert(kWarpgroups == MaterialisedTiles::kBlockRows);
  static constexpr int kThreads = tile::kWarpgroupSize * (kWarpgroups + 1);
  static_assert(kRows == tile::kWarpgroupRows);

  using QTile = tile::SmemTile<Element, kRows, kDims.qk>;
  using DoutTile = tile::SmemTile<Element, kRows, kDims.v>;
  using KTile = tile::SmemTile<Element, kRows, kDims.qk>;
  using VTile = tile::SmemTile<Element, kRows, kDims.v>;
  using Scores = tile::WarpgroupAccumulator<kRows>;  // rows are queries
  using Where = ScoreTile<Rows::kQueries, Scores>;
  using BiasTile = std::conditional_t<kHasBoxes, tile::SmemTile<Element, kRows, kRows>, NoBiasMask>;
  using Staged = std::conditional_t<kStagesBiasMask, StagedBiasMask<Element, Where, true>, NoBiasMask>;
};

// What the producer tells a warpgroup about a key tile, where a mask may hide whole tiles.
struct UnmaskedIteration {
  static constexpr int kSeen = 1;      // the warpgroup's queries attend some of it
  static constexpr int kMasked = 2;    // the mask hides some of it
  static constexpr int kNextSeen = 4;  // the warpgroup's queries attend some of the next tile
  static constexpr int kLast = 8;      // there is no next tile
  static constexpr int kTileShift = 4;

  int word;

  __device__ __forceinline__ int tile() const { return word >> kTileShift; }
  __device__ __forceinline__ bool has(int flag) const { return (word & flag) != 0; }
};

// What the producer of the dQ kernel tells the consumers about a work tile.
struct QueryTileWork {
  static constexpr int kEnd = -1;

  int batch;  // kEnd: there are no more work tiles
  int head;
  int key_head;
  int head_of_group;
  int query_begin;  // of the sequence
  int key_begin;
  int num_queries;
  int num_keys;
  int tile;        // the first warpgroup's, of MaterialisedTiles::kRows queries
  int statistics;  // the index of that tile in the workspace
  int stored[2];   // each warpgroup's first materialised tile
  int begin;       // key tiles [begin, end) that any of the queries sees
  int end;
  TileRange own[2];  // those that the queries of each warpgroup see
  int sums;          // the index of the first warpgroup's tile among those of query_sums
};

// Describes the query head of a work tile to the consumers.
template <class Work>
__device__ __forceinline__ void describe_head(Work& work, const Schedule& schedule, const Place& at,
                                              const attention::Sequence& sequence) {
  work.batch = static_cast<int>(at.batch);
  work.key_head = static_cast<int>(at.key_head);
  work.head_of_group = static_cast<int>(at.head_of_group);
  work.head = static_cast<int>(at.key_head * schedule.group + at.head_of_group);
  work.query_begin = static_cast<int>(sequence.query_begin);
  work.key_begin = static_cast<int>(sequence.key_begin);
}

template <class Traits>
struct TwoPassDqShared {
  static constexpr int kWarpgroups = Traits::kWarpgroups;
  static constexpr int kComputingWarps = 4 * kWarpgroups;
  static constexpr int kWorkStages = 2;

  typename Traits::QTile q[kWarpgroups];
  typename Traits::DoutTile dout[kWarpgroups];
  typename Traits::KTile k[Traits::kConfig.k_stages];
  typename Traits::VTile v[Traits::kConfig.v_stages];
  typename Traits::BiasTile bias[Traits::kHasBoxes ? Traits::kConfig.k_stages : 1][kWarpgroups];  // in the stages of K
  typename Traits::Staged staged[Traits::kStagesBiasMask ? kComputingWarps : 1];
  UnmaskedIteration iterations[Traits::kSkipsTiles ? Traits::kConfig.k_stages : 1][kWarpgroups];  // of K's stages
  QueryTileWork work[kWorkStages];
  tile::PipelineBarriers<1> q_pipeline[kWarpgroups];
  tile::PipelineBarriers<1> dout_pipeline[kWarpgroups];
  tile::PipelineBarriers<Traits::kConfig.k_stages> k_pipeline;
  tile::PipelineBarriers<Traits::kConfig.v_stages> v_pipeline;
  tile::PipelineBarriers<kWorkStages> work_pipeline;

  __device__ __forceinline__ void init() {
    for (auto& pipeline : q_pipeline) pipeline.init(4);
    for (auto& pipeline : dout_pipeline) pipeline.init(4);
    k_pipeline.init(kComputingWarps);
    v_pipeline.init(kComputingWarps);
    work_pipeline.init(kComputingWarps);
    ptx::fence_barrier_init();
  }
};

// Traits of the GEMM kernel, which computes dV and dK from materialised tiles. kSkipsTiles: a mask may have left tiles
// out.
template <class ElementType, HeadDims kDimsValue, bool kSkipsTilesValue>
struct TwoPassGemmTraits {
  using Element = ElementType;
  // A work tile has a column part of the result where that is wider.
  static constexpr HeadDims kDims = {std::min(kDimsValue.qk, kColumnsOfPart), std::min(kDimsValue.v, kColumnsOfPart)};
  static constexpr bool kHasParts = kDims != kDimsValue;
  static constexpr bool kKeysInOrder = kHasParts;  // materialised tiles come from the score kernel
  static constexpr bool kSkipsTiles = kSkipsTilesValue;
  static constexpr int kRows = MaterialisedTiles::kRows;  // keys of a warpgroup, and queries of a step
  static constexpr GemmTile kTile = gemm_tile(kDims);
  static constexpr int kWarpgroups = kTile.warpgroups;
  static constexpr int kKeys = kTile.keys();
  static_assert(kKeys == kWarpgroups * kRows);
  static constexpr int kThreads = tile::kWarpgroupSize * (kWarpgroups + 1);
  static constexpr int kColumns = kDims.qk > kDims.v ? kDims.qk : kDims.v;

  using LeftTile = tile::SmemTile<Element, kRows, kRows>;  // of P or dS
  template <int kWidth>
  using RightTile = tile::SmemTile<Element, kRows, kWidth>;  // of dO or Q
};

// Which columns of the result a work tile computes, where a result has several column parts.
template <bool kHasParts>
struct ColumnPart {
  static constexpr int first_column = 0;
};
template <>
struct ColumnPart<true> {
  int first_column;
};

// What the producer of the GEMM kernel tells the consumers about a work tile.
template <int kWarpgroups, bool kHasParts>
struct GemmWork : ColumnPart<kHasParts> {
  static constexpr int kEnd = -1;

  int batch;  // kEnd: there are no more work tiles
  int key_head;
  bool is_dk;
  int query_begin;  // of the sequence
  int key_begin;
  SeenTiles seen;
  int tile;     // the first warpgroup's, of MaterialisedTiles::kRows keys
  int flags;    // the first of the work tile's non-finite flags
  int partial;  // the index of the work tile among those of key_sums
  int stored;   // MaterialisedTiles::first_of_head of the KV group's first head
  int row;      // the sequence's first row of materialised tiles
  int begin;    // the launch's query tiles [begin, end) that see any of the keys
  int end;
  TileRange own[kWarpgroups];  // those that see the keys of each warpgroup
};

template <class Traits>
struct TwoPassGemmShared {
  static constexpr int kComputingWarps = 4 * Traits::kWarpgroups;
  static constexpr int kWorkStages = 2;
  static constexpr int kStages = Traits::kTile.stages;
  static constexpr int kEnd = 1 << Traits::kWarpgroups;  // the work tile has no more iterations; the stage is empty
  using Work = GemmWork<Traits::kWarpgroups, Traits::kHasParts>;
  using RightTile = typename Traits::template RightTile<Traits::kColumns>;

  typename Traits::LeftTile left[kStages][Traits::kWarpgroups];
  RightTile right[kStages];
  int iterations[Traits::kSkipsTiles ? kStages : 1];  // which warpgroups have a tile in `left`, as bits; or kEnd
  Work work[kWorkStages];
  tile::PipelineBarriers<kStages> pipeline;
  tile::PipelineBarriers<kWorkStages> work_pipeline;

  __device__ __forceinline__ void init() {
    pipeline.init(kComputingWarps);
    work_pipeline.init(kComputingWarps);
    ptx::fence_barrier_init();
  }
};

}  // namespace flash_attn_ext::sm90
