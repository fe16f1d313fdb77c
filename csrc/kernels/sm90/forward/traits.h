// What a forward kernel is compiled for, and what lies in its shared memory.
#pragma once

#include <cuda_bf16.h>

#include <type_traits>

#include "kernels/config/sm90.h"
#include "kernels/schedule/tile_range.cuh"
#include "kernels/schedule/work_item.h"
#include "kernels/score/bias_mask.cuh"
#include "kernels/score/mask_coverage.cuh"
#include "tile/sm90/gemm.h"
#include "tile/sm90/pipeline.h"
#include "tile/sm90/row_sums.h"

namespace flash_attn_ext::sm90 {

template <class ElementType, HeadDims kDimsValue, Variant kVariantValue>
struct ForwardTraits {
  using Element = ElementType;
  static constexpr HeadDims kDims = kDimsValue;
  static constexpr Variant kVariant = kVariantValue;
  static constexpr bool kIsBfloat16 = std::is_same_v<Element, __nv_bfloat16>;
  static constexpr ForwardTile kTile = forward_tile(kDims, kVariant);
  static constexpr ForwardRegisters kRegisters = forward_registers(kTile, kVariant);
  static_assert(has_registers(kTile.warpgroups, kRegisters.consumer, kRegisters.producer, kTile.blocks));
  static constexpr bool kExtended = kVariant == Variant::kExtended;
  static constexpr bool kHasBias = kExtended || kVariant == Variant::kBiasMask;
  static constexpr bool kHasBiasOrMask = kHasBias || kVariant == Variant::kMask;  // a bias, a mask
  static constexpr bool kMayDrop = kExtended || kVariant == Variant::kDropout;
  static constexpr int kWarps = 4 * kTile.warpgroups;  // of the consumers
  static constexpr int kQueries = tile::kWarpgroupRows * kTile.warpgroups;
  static constexpr int kThreads = tile::kWarpgroupSize * (kTile.warpgroups + 1);

  static constexpr bool kSplitsKv = kVariant == Variant::kSplitKv;

  // TMA stores O, staged in its rows of Q. With one stage of Q the next work tile would have to wait for the store.
  // With dropout or a mask it is slower, since ptxas then gives the GEMMs fewer uniform registers.
  static constexpr bool kTmaStoresOutput = is_plain(kVariant) && kTile.query_stages == 2 && !kSplitsKv;

  // Computes the LSE and the factors of O while the last GEMM is in flight. With three warpgroups the GEMMs of the
  // others hide them already, and registers are short.
  static constexpr bool kEndsRowsFirst = is_plain(kVariant) && !kSplitsKv && kTile.warpgroups == 2 && kTile.blocks == 1;

  // With one stage of Q, releases it after the last S of a work tile rather than after its last softmax, so that the
  // load of the next queries starts earlier.
  static constexpr bool kReleasesQueriesEarly = is_plain(kVariant) && kTile.query_stages == 1;

  // ptxas moves the wait for the PV GEMM ahead of a tile's exponentials, where it is best in most kernels. Where tiles
  // are few, or without ping-pong, the wait stays after a quarter of the exponentials (docs/kernels/log/sm90.md, "When
  // O is awaited"); with dropout, after all of them and the draws.
  static constexpr bool kAwaitsWithin = kTile.overlaps && (kVariant == Variant::kShort || !kTile.ping_pong);

  // Has a mainloop of its own for tiles of keys without masked scores. With three warpgroups, or more columns of O, a
  // single loop is as fast.
  static constexpr bool kLoopForFull =
      is_plain(kVariant) && kTile.blocks == 1 && kTile.warpgroups == 2 && kDims.v <= 128;

  // The first tile of keys contains the causal or window boundary, and the 64 rows of a warpgroup may see only its
  // first half: the softmax then covers that half (docs/kernels/log/sm90.md, "Half of a first tile"). Not with
  // split-KV, where the last tile of a split need not be that of the row.
  static constexpr bool kHalvesFirst = kLoopForFull && kTile.keys == 128 && !kSplitsKv;

  // Divides O by the sums of the rounded P. The exponents may then be relative to less than the row maximum; otherwise
  // a dominant weight, which is exactly 1 relative to the maximum, would bring its own rounding error into O. With
  // dropout the sums cover the kept weights, and the divisor is scaled by the ratio of all weights to the kept ones.
  // Not at head dim 96: the tile of V has no room for columns of ones, and additions instead are slower in float16
  // (docs/kernels/log/sm90.md, "Sums of rounded weights by additions").
  static constexpr bool kSumsRounded =
      (is_plain(kVariant) || kVariant == Variant::kMask || kVariant == Variant::kDropout) && kDims.v != 96;
  // The sums come from additions in bfloat16 where one wgmma does not hold V and the ones; elsewhere from that wgmma,
  // which is faster.
  static constexpr bool kAddsSums = kSumsRounded && kIsBfloat16 && kDims.v == 256;
  static constexpr bool kHasOnes = kSumsRounded && !kAddsSums;
  using RowSums = std::conditional_t<kAddsSums, tile::AddedRowSums, tile::RowSums>;
  static constexpr float kRescaleThresholdLog2 = kSumsRounded ? 8.0f : 0.0f;

  // Keeps the row maximum of the first tile of keys while the sums stay in range. float16 has no range to spare.
  static constexpr bool kKeepsFirstMaximum = kSumsRounded && kIsBfloat16;

  using QTile = tile::SmemTile<Element, tile::kWarpgroupRows, kDims.qk>;
  using KTile = tile::SmemTile<Element, kTile.keys, kDims.qk>;
  using VTile = std::conditional_t<kHasOnes, tile::SmemTileWithOnes<Element, kTile.keys, kDims.v>,
                                   tile::SmemTile<Element, kTile.keys, kDims.v>>;
  using Scores = tile::WarpgroupAccumulator<kTile.keys>;
  using HalfOfScores = tile::WarpgroupAccumulator<kTile.keys / 2>;
  using Output = tile::WarpgroupAccumulator<kDims.v>;

  using Where = ScoreTile<Rows::kQueries, Scores>;
  // TMA loads a bias beside K where its strides allow it, and a mask is packed into bits. Extended kernels copy both
  // themselves, whatever their strides.
  static constexpr bool kHasBoxes = kVariant == Variant::kBiasMask;
  static constexpr bool kHasBits = kHasBiasOrMask && !kExtended;
  using BiasTile = std::conditional_t<kHasBoxes, tile::SmemTile<Element, tile::kWarpgroupRows, kTile.keys>, NoBiasMask>;
  using Staged = std::conditional_t<kExtended, StagedBiasMask<Element, Where, true>, NoBiasMask>;
};

enum class WorkKind {
  kTile,       // a work tile
  kAgain,      // a flagged work tile, to be recomputed
  kAllPassed,  // every work tile was processed once; flagged ones follow, if there are any
  kEnd,
};

// What the scheduler publishes about a work tile.
template <int kWarpgroups>
struct Work {
  WorkKind kind;
  int tile;          // of the schedule
  int first_column;  // of V and O
  int first_query;
  int split;  // the split of its keys
  WorkItem item;
  int begin;  // tiles of keys [begin, end), in descending order; the last one is not wholly masked
  int end;
  // The tiles that each warpgroup's queries see; a range past all of them where that is nothing.
  TileRange own[kWarpgroups];
  bool sees_half[kWarpgroups];  // only the first half of its last tile is visible (ForwardTraits::kHalvesFirst)
};

// The tile of keys that the producer loads, and the one that it loads next; a number below Work::begin means none.
struct KeyIteration {
  Iteration at;
  Iteration next;
};

// The producer acquires empty stages and fills them; the consumers wait for full stages and release them.
template <class Traits>
struct ForwardShared {
  static constexpr int kStages = Traits::kTile.key_stages;
  static constexpr int kWorkStages = 4;
  static constexpr int kWarpgroups = Traits::kTile.warpgroups;

  typename Traits::QTile q[Traits::kTile.query_stages][kWarpgroups];
  typename Traits::KTile k[kStages];
  typename Traits::VTile v[kStages];
  typename Traits::BiasTile bias[Traits::kHasBoxes ? kStages : 1][kWarpgroups];  // stages of k
  using Work = sm90::Work<kWarpgroups>;
  Work work[kWorkStages];
  KeyIteration iterations[Traits::kHasBiasOrMask ? kStages
                                                 : 1];  // which tiles of keys are in k, where a mask may leave some out
  typename Traits::Staged staged[Traits::kExtended ? Traits::kWarps : 1];
  tile::PipelineBarriers<Traits::kTile.query_stages> q_pipeline;
  tile::PipelineBarriers<kStages> k_pipeline;
  tile::PipelineBarriers<kStages> v_pipeline;
  tile::PipelineBarriers<kWorkStages> work_pipeline;
  ptx::Barrier may_fetch_work;  // the producer allows the scheduler to fetch the next work tile
  ptx::Barrier all_passed;      // every work tile was processed once
  int any_flagged;              // whether one of the CTA's work tiles is flagged

  __device__ __forceinline__ void init() {
    q_pipeline.init(Traits::kTmaStoresOutput ? Traits::kWarps : kWarpgroups);
    k_pipeline.init(kWarpgroups);
    v_pipeline.init(kWarpgroups);
    work_pipeline.init(Traits::kWarps + 1);  // and the producer
    ptx::init_barrier(may_fetch_work, 1);
    ptx::init_barrier(all_passed, Traits::kWarps);
    any_flagged = 0;
    ptx::fence_barrier_init();
  }

  // Called by the consumers while the first loads are in flight.
  __device__ __forceinline__ void set_ones() {
    constexpr int kReadyBarrier = 15;
    constexpr int kThreads = kWarpgroups * tile::kWarpgroupSize;
    for (auto& stage : v) stage.set_ones(static_cast<int>(threadIdx.x) - tile::kWarpgroupSize, kThreads);
    ptx::fence_stores();
    ptx::sync_named(kReadyBarrier, kThreads);
  }

  // Waits until every work tile was processed once. Returns whether some have to be recomputed.
  __device__ __forceinline__ bool wait_for_flags() {
    ptx::wait(all_passed, 0);
    return *const_cast<volatile int*>(&any_flagged) != 0;
  }
};

}  // namespace flash_attn_ext::sm90
