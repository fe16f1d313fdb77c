// What a forward kernel is compiled for, and what lies in its shared memory.
#pragma once

#include <cuda_bf16.h>

#include <type_traits>

#include "kernels/schedule/tile_range.cuh"
#include "kernels/schedule/work_item.h"
#include "kernels/score/bias_mask.cuh"
#include "kernels/score/mask_coverage.cuh"
#include "kernels/tile_config_sm90.h"
#include "tile/sm90/gemm.h"
#include "tile/sm90/ring.h"
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
  static constexpr bool kHasTerms = kHasBias || kVariant == Variant::kMask;  // a bias, a mask
  static constexpr bool kMayDrop = kExtended || kVariant == Variant::kDropout;
  static constexpr int kWarps = 4 * kTile.warpgroups;  // that compute
  static constexpr int kQueries = tile::kWarpgroupRows * kTile.warpgroups;
  static constexpr int kThreads = tile::kWarpgroupSize * (kTile.warpgroups + 1);

  static constexpr bool kDividesKeys = kVariant == Variant::kParts;

  // O leaves through its rows of Q by the copy engine. (With one stage of Q the next tile's would have to wait; and
  // with dropout or a mask it is slower, since ptxas gives the products fewer uniform registers.)
  static constexpr bool kSendsOutput = is_plain(kVariant) && kTile.query_stages == 2 && !kDividesKeys;

  // Sums and the LSE are finished while the last product is under way, not behind it. (With three warpgroups those of
  // others hide them, and registers are short.)
  static constexpr bool kEndsRowsFirst =
      is_plain(kVariant) && !kDividesKeys && kTile.warpgroups == 2 && kTile.blocks == 1;

  // Q's one stage is given back with a tile's last S, not behind its last softmax: the next tile's comes from memory.
  static constexpr bool kGivesQueriesBackEarly = is_plain(kVariant) && kTile.query_stages == 1;

  // ptxas moves the wait for O ahead of a tile's exponentials, where it is best in most kernels. Where tiles are few,
  // or warpgroups take no turns, it is kept behind a quarter of them, and with dropout behind all of them and the
  // draws.
  static constexpr bool kAwaitsWithin = kTile.overlaps && (kVariant == Variant::kShort || !kTile.takes_turns);

  // A loop of its own for tiles of keys that all rows see whole. (With three warpgroups, or O of more columns, one for
  // all of them is as fast.)
  static constexpr bool kLoopForFull =
      is_plain(kVariant) && kTile.blocks == 1 && kTile.warpgroups == 2 && kDims.v <= 128;

  // The first tile of keys lies at an edge of what is visible, of which a warpgroup's 64 rows may see nothing beyond
  // its first half: then the softmax is of that half alone. (H200, us, head dim 128, causal S 512 98.6 -> 97.0, a
  // window of 512 147.5 -> 144.7. With three warpgroups, at head dim 64, causal S 2048 287 -> 279, but full S 512 159
  // -> 162. Not where blocks share a row's keys: a part's last tile need not be the row's.)
  static constexpr bool kHalvesFirst = kLoopForFull && kTile.keys == 128 && !kDividesKeys;

  // O is divided by the sums of P as it was rounded. Then exponents may refer to less than the row's maximum: else a
  // weight that outshines all others, and is 1 where they refer to it, would bring its own rounding into O. With
  // dropout these are sums of what is kept, and O is divided by the sum of all times theirs to that before rounding.
  // Not at head dim 96: its V has no room for ones, and additions instead would take float16 longer. (bfloat16 0.94 of
  // the time from 2048 tokens on, but up to 1.05 of the mean error that is allowed.)
  static constexpr bool kSumsRounded =
      (is_plain(kVariant) || kVariant == Variant::kMask || kVariant == Variant::kDropout) && kDims.v != 96;
  // By additions in bfloat16 where one product does not hold V and the ones; elsewhere by that product, with which
  // additions take up to 13 % longer.
  static constexpr bool kAddsSums = kSumsRounded && kIsBfloat16 && kDims.v == 256;
  static constexpr bool kHasOnes = kSumsRounded && !kAddsSums;
  using RowSums = std::conditional_t<kAddsSums, tile::AddedRowSums, tile::RowSums>;
  static constexpr float kRaiseLog2 = kSumsRounded ? 8.0f : 0.0f;

  // Exponents refer to the row's maximum over its first tile of keys, as long as sums stay in range. float16 has no
  // range to spare.
  static constexpr bool kFixesReference = kSumsRounded && kIsBfloat16;

  using QTile = tile::BoxTile<Element, tile::kWarpgroupRows, kDims.qk>;
  using KTile = tile::BoxTile<Element, kTile.keys, kDims.qk>;
  using VTile = std::conditional_t<kHasOnes, tile::BoxTileWithOnes<Element, kTile.keys, kDims.v>,
                                   tile::BoxTile<Element, kTile.keys, kDims.v>>;
  using Scores = tile::WarpgroupAccumulator<kTile.keys>;
  using HalfOfScores = tile::WarpgroupAccumulator<kTile.keys / 2>;
  using Output = tile::WarpgroupAccumulator<kDims.v>;

  using Where = ScoreTile<Rows::kQueries, Scores>;
  // A bias comes with K where its strides allow it, and a mask as bits. Extended kernels copy both themselves, from
  // wherever they are.
  static constexpr bool kHasBoxes = kVariant == Variant::kBiasMask;
  static constexpr bool kHasBits = kHasTerms && !kExtended;
  using BiasTile = std::conditional_t<kHasBoxes, tile::BoxTile<Element, tile::kWarpgroupRows, kTile.keys>, NoBiasMask>;
  using Staged = std::conditional_t<kExtended, StagedBiasMask<Element, Where, true>, NoBiasMask>;
};

enum class WorkKind {
  kTile,       // a tile of queries
  kAgain,      // one that was flagged
  kAllPassed,  // every tile has had its turn: flagged ones follow, if there are any
  kEnd,
};

// What the scheduler tells the others about a tile of queries.
template <int kWarpgroups>
struct Work {
  WorkKind kind;
  int tile;          // of the schedule
  int first_column;  // of V and O
  int first_query;
  int part;  // of its keys
  WorkItem item;
  int begin;  // tiles of keys [begin, end), from the last one down; the mask leaves something of the last one
  int end;
  // What each warpgroup's queries see of them; where that is nothing, it lies behind them all.
  TileRange own[kWarpgroups];
  bool sees_half[kWarpgroups];  // nothing beyond the first half of its last tile (ForwardTraits::kHalvesFirst)
};

// A tile of keys that the producer sends, and the one that it sends next: tile numbers before Work::begin mean none.
struct KeyVisit {
  Visit at;
  Visit next;
};

// Full and empty stages: the producer waits for empty ones and fills them, the consumers the other way round.
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
  KeyVisit visits[Traits::kHasTerms ? kStages : 1];  // which tiles of keys are in k, where a mask may leave some out
  typename Traits::Staged staged[Traits::kExtended ? Traits::kWarps : 1];
  tile::RingBarriers<Traits::kTile.query_stages> q_ring;
  tile::RingBarriers<kStages> k_ring;
  tile::RingBarriers<kStages> v_ring;
  tile::RingBarriers<kWorkStages> work_ring;
  ptx::Barrier may_claim;   // the producer has come so far that the next tile may be claimed
  ptx::Barrier all_passed;  // all tiles have had their turn
  int any_flagged;          // of the block's tiles

  __device__ __forceinline__ void init() {
    q_ring.init(Traits::kSendsOutput ? Traits::kWarps : kWarpgroups);
    k_ring.init(kWarpgroups);
    v_ring.init(kWarpgroups);
    work_ring.init(Traits::kWarps + 1);  // and the producer
    ptx::init_barrier(may_claim, 1);
    ptx::init_barrier(all_passed, Traits::kWarps);
    any_flagged = 0;
    ptx::fence_barrier_init();
  }

  // By the warpgroups that compute, while the first copies are under way.
  __device__ __forceinline__ void set_ones() {
    constexpr int kReadyBarrier = 15;
    constexpr int kThreads = kWarpgroups * tile::kWarpgroupSize;
    for (auto& stage : v) stage.set_ones(static_cast<int>(threadIdx.x) - tile::kWarpgroupSize, kThreads);
    ptx::fence_stores();
    ptx::sync_named(kReadyBarrier, kThreads);
  }

  // Once all tiles have had their turn: whether some have to be computed again.
  __device__ __forceinline__ bool wait_for_flags() {
    ptx::wait(all_passed, 0);
    return *const_cast<volatile int*>(&any_flagged) != 0;
  }
};

}  // namespace flash_attn_ext::sm90
