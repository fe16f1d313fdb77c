// Arguments, traits and shared memory of the forward kernel.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "attention/key_bias.h"
#include "attention/params.h"
#include "kernels/common/rows/merged_row.cuh"
#include "kernels/config/sm90_forward.h"
#include "kernels/schedule/existing_tiles.h"
#include "kernels/schedule/head_tiles.h"
#include "kernels/schedule/key_intervals.cuh"
#include "kernels/schedule/schedule.cuh"
#include "kernels/score/bias_mask.cuh"
#include "kernels/score/mask_coverage.cuh"
#include "kernels/sm90/forward/key_bias.cuh"
#include "kernels/sm90/forward/row_softmax.cuh"
#include "kernels/sm90/tensor_map.h"
#include "tile/sm90/augmented_columns.h"
#include "tile/sm90/gemm.h"
#include "tile/sm90/pipeline.h"
#include "tile/sm90/row_sums.h"

namespace flash_attn_ext::sm90 {

// A linked list of the work tiles of each CTA, so that it can recompute those whose flag is set.
struct TileFlags {
  int* previous;   // for each work tile, the one that the same CTA had before it, or -1
  uint8_t* flags;  // one per work tile and warp
};

// Split-KV: where the tiles of queries leave SMs idle, `count` CTAs share the keys of each tile.
struct KvSplits {
  int count = 1;
  int column_slices = 1;   // of a tile's O
  int tiles = 1;           // of a head's queries
  common::SplitRows rows;  // a slot for each tile, slice and split
};

// The TMA boxes of a tile of K or V, where these are a cache: each has as many consecutive rows as fit both a page and
// a tile.
struct KeyBoxes {
  int rows;
  int count;
};

// Params: BasicForwardParams, or ForwardParams of kernels that write row_max.
template <class Params>
struct ForwardArguments {
  TmaDescriptor q;
  TmaDescriptor k;
  TmaDescriptor v;
  BiasDescriptor bias;  // only of kernels for a bias and a mask
  OutputMap out;
  Params params;
  Schedule schedule;
  TileFlags flags;
  KvSplits kv_splits;
  uint32_t* work_counter;  // how many work tiles were fetched; 0 when the kernel starts and when it ends
  KeyIntervals intervals;
  ExistingTiles existing_tiles;
  KeyBoxes key_boxes;     // only of kernels for a cache
  int log2_packed_heads;  // the same: log2 of the number of query heads whose rows share a tile (PackGQA)
  attention::KeyBiasMaxima key_bias_maxima;  // only of kernels for a key bias
};

template <class ElementType, ForwardConfig kConfigValue>
struct ForwardTraits {
  using Element = ElementType;
  static constexpr ForwardConfig kConfig = kConfigValue;
  static constexpr HeadDims kDims = kConfig.dims;
  static constexpr bool kIsBfloat16 = std::is_same_v<Element, __nv_bfloat16>;
  static constexpr ForwardRegisters kRegisters = forward_registers(kConfig);
  static_assert(has_registers(kConfig.warpgroups, kRegisters.consumer, kRegisters.producer, kConfig.ctas_per_sm));
  static constexpr bool kGeneric = kConfig.score == ScoreMode::kGeneric;
  static constexpr int kWarps = 4 * kConfig.warpgroups;  // of the consumers
  static constexpr int kQueries = kConfig.block_m();
  static_assert(kQueries == tile::kWarpgroupRows * kConfig.warpgroups);
  static constexpr int kThreads = tile::kWarpgroupSize * (kConfig.warpgroups + 1);

  // With one stage of K and V, a consumer needs V of a tile before K of the next one.
  static constexpr bool kValuesFirst = kConfig.kv_stages == 1;
  static_assert(!kValuesFirst || !(kConfig.intra_overlap || kConfig.has_bias_or_mask()));

  // The sums of rounded P come from additions in bfloat16 where one wgmma does not hold V and the columns of ones;
  // elsewhere from that wgmma, which is faster.
  static constexpr bool kAddsSums = kConfig.rounded_sums && kIsBfloat16 && kDims.v == 256;
  static constexpr bool kHasOnes = kConfig.rounded_sums && !kAddsSums;
  using RowSums = std::conditional_t<kAddsSums, tile::AddedRowSums, tile::RowSums>;
  // With rounded sums the row maximum m is stale, and row_max is kept beside it.
  static constexpr bool kTracksRowMax = kConfig.row_max && kConfig.rounded_sums;
  static_assert(!kTracksRowMax || !kConfig.may_drop(), "the largest P is asked for after dropout");
  using Softmax = RowSoftmax<kTracksRowMax>;
  using Arguments =
      ForwardArguments<std::conditional_t<kConfig.row_max, attention::ForwardParams, attention::BasicForwardParams>>;
  static constexpr float kRescaleThresholdLog2 = kConfig.rounded_sums ? 8.0f : 0.0f;

  // Keeps the row maximum of the first tile of keys while the sums stay in range. float16 has no range to spare. With a
  // key bias the first tile is often padding, of which the maximum says nothing; with ALiBi of later keys it is too
  // low.
  static constexpr bool kKeepsFirstMaximum =
      kConfig.rounded_sums && kIsBfloat16 && !kConfig.has_key_bias() && !kConfig.later_keys;

  using QTile = tile::SmemTile<Element, tile::kWarpgroupRows, kDims.qk>;
  using KTile = tile::SmemTile<Element, kConfig.block_n, kDims.qk>;
  using VTile = std::conditional_t<kHasOnes, tile::SmemTileWithOnes<Element, kConfig.block_n, kDims.v>,
                                   tile::SmemTile<Element, kConfig.block_n, kDims.v>>;
  using Scores = tile::WarpgroupAccumulator<kConfig.block_n>;
  using Output = tile::WarpgroupAccumulator<kDims.v>;

  using Where = ScoreTile<Rows::kQueries, Scores>;
  // TMA loads a bias beside K where its strides allow it, and a mask is packed into bits. Generic kernels copy both
  // themselves, whatever their strides.
  static constexpr bool kHasBoxes = reads_bias_boxes(kConfig.score);
  static constexpr bool kHasBits = kConfig.has_bias_or_mask() && !kGeneric;
  using BiasTile =
      std::conditional_t<kHasBoxes, tile::SmemTile<Element, tile::kWarpgroupRows, kConfig.block_n>, NoBiasMask>;
  using Staged = std::conditional_t<kGeneric, StagedBiasMask<Element, Where, true>, NoBiasMask>;
  static constexpr int kKeyBiasWarps = kConfig.has_key_bias() ? 1 : 0;  // that write it
  // Of bfloat16 beside either type of q: float16's largest number is too small for a float32 bias.
  using KeyBias = tile::AugmentedColumns<__nv_bfloat16, kConfig.block_n>;
};

// Named barriers. Barrier 0 is __syncthreads. A warpgroup adds its index where each has a barrier of its own.
struct ForwardBarrier {
  enum : int {
    kMayIssue = 1,    // of each consumer, where they run in ping-pong
    kWarpgroup = 8,   // of each consumer: its warps
    kOnesAreSet = 15  // all consumers
  };
};

enum class WorkKind {
  kTile,          // a work tile
  kAgain,         // a flagged work tile, to be recomputed
  kAllProcessed,  // every work tile was processed once; flagged ones follow, if there are any
  kEnd,
};

// What the scheduler publishes about a work tile.
template <int kWarpgroups>
struct Work {
  WorkKind kind;
  int tile;          // of the schedule
  int first_column;  // of V and O
  int first_query;   // the first row, where heads are packed
  int split;         // the split of its keys
  HeadCoord coord;   // of the first of packed heads
  int begin;         // tiles of keys [begin, end), in descending order; the last one is not wholly masked
  int end;
  // The tiles that each warpgroup's queries see; a range past all of them where that is nothing.
  TileRange own[kWarpgroups];
};

// The tile of keys that the producer loads, and the one that it loads next; an index below Work::begin means none.
struct KeyIteration {
  MainloopTile at;
  MainloopTile next;
};

// The producer acquires empty stages and fills them; the consumers wait for full stages and release them.
template <class Traits>
struct ForwardShared {
  static constexpr int kStages = Traits::kConfig.kv_stages;
  static constexpr int kWorkStages = 4;
  static constexpr int kWarpgroups = Traits::kConfig.warpgroups;

  typename Traits::QTile q[Traits::kConfig.q_stages][kWarpgroups];
  typename Traits::KTile k[kStages];
  struct KeyBiasStages {
    tile::SharedColumnFactors<typename Traits::KeyBias::Element> factors;
    typename Traits::KeyBias columns[kStages];  // stages of k
    float maximum[kWorkStages];                 // that is subtracted from them
  };
  struct NoKeyBias {};
  // Large members follow, because compute-sanitizer ignores strides of 0 in the descriptors of factors and columns, and
  // would report a read past the end of shared memory.
  [[no_unique_address]] std::conditional_t<Traits::kConfig.has_key_bias(), KeyBiasStages, NoKeyBias> key_bias;
  typename Traits::VTile v[kStages];
  typename Traits::BiasTile bias[Traits::kHasBoxes ? kStages : 1][kWarpgroups];  // stages of k
  using Work = sm90::Work<kWarpgroups>;
  Work work[kWorkStages];
  KeyIteration iterations[Traits::kConfig.has_bias_or_mask() ? kStages : 1];  // which tiles of keys are in k, where a
                                                                              // mask may leave some out
  typename Traits::Staged staged[Traits::kGeneric ? Traits::kWarps : 1];
  tile::PipelineBarriers<Traits::kConfig.q_stages> q_pipeline;
  tile::PipelineBarriers<kStages> k_pipeline;
  tile::PipelineBarriers<kStages> v_pipeline;
  tile::PipelineBarriers<kWorkStages> work_pipeline;
  ptx::Barrier may_fetch_work;  // the producer allows the scheduler to fetch the next work tile
  ptx::Barrier all_processed;   // every work tile was processed once
  int any_flagged;              // whether one of the CTA's work tiles is flagged

  __device__ __forceinline__ void init() {
    q_pipeline.init(Traits::kConfig.tma_store ? Traits::kWarps : kWarpgroups);
    k_pipeline.init(kWarpgroups, 1 + Traits::kKeyBiasWarps);
    v_pipeline.init(kWarpgroups);
    // And the producers.
    work_pipeline.init(Traits::kWarps + (Traits::kConfig.kv_cache ? 2 : 1) + Traits::kKeyBiasWarps);
    ptx::init_barrier(may_fetch_work, 1);
    ptx::init_barrier(all_processed, Traits::kWarps);
    any_flagged = 0;
    ptx::fence_barrier_init();
  }

  // What was subtracted from the biases of a work tile's keys, once some of these have arrived.
  __device__ __forceinline__ float key_bias_maximum([[maybe_unused]] int work_stage) const {
    if constexpr (Traits::kConfig.has_key_bias()) {
      return key_bias.maximum[work_stage];
    } else {
      return 0.0f;
    }
  }

  // Called by the consumers while the first loads are in flight.
  __device__ __forceinline__ void set_ones() {
    constexpr int kThreads = kWarpgroups * tile::kWarpgroupSize;
    for (auto& stage : v) stage.set_ones(static_cast<int>(threadIdx.x) - tile::kWarpgroupSize, kThreads);
    ptx::fence_stores();
    ptx::sync_named(ForwardBarrier::kOnesAreSet, kThreads);
  }

  // Waits until every work tile was processed once. Returns whether some have to be recomputed.
  __device__ __forceinline__ bool wait_for_flags() {
    ptx::wait(all_processed, 0);
    return *const_cast<volatile int*>(&any_flagged) != 0;
  }
};

}  // namespace flash_attn_ext::sm90
