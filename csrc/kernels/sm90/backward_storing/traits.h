// What the kernels are compiled for, and what lies in their shared memory.
#pragma once

#include <type_traits>

#include "kernels/schedule/block.cuh"
#include "kernels/score/bias_mask.cuh"
#include "kernels/score/score_tile.cuh"
#include "kernels/sm90/backward_storing/arguments.h"
#include "kernels/sm90/backward_storing/seen_tiles.h"
#include "kernels/sm90/uniform.h"
#include "kernels/tile_config_storing.h"
#include "tile/sm90/gemm.h"
#include "tile/sm90/ring.h"

namespace flash_attn_ext::sm90 {

// The dQ kernel.
template <class ElementType, HeadDims kDimsValue, Variant kVariantValue>
struct StoringDqTraits {
  using Element = ElementType;
  static constexpr HeadDims kDims = kDimsValue;
  static constexpr Variant kVariant = kVariantValue;
  static constexpr StoringTile kTile = storing_tile(kDims, kVariant);
  static constexpr bool kStagesTerms = kVariant == Variant::kExtended;  // a bias and a mask, for each warp
  static constexpr bool kExtended = kStagesTerms || kVariant == Variant::kModified;
  static constexpr bool kHasBoxes = kVariant == Variant::kBiasMask;  // a bias beside K
  static constexpr bool kHasBits = kHasBoxes || kVariant == Variant::kMask;
  static constexpr bool kHasBias = kHasBoxes || kStagesTerms;
  static constexpr bool kSkipsTiles = kHasBits || kStagesTerms;  // of keys, which a mask hides whole
  static constexpr int kRows = ScoreTiles::kRows;                // of a warpgroup's queries, and of a tile of keys
  static constexpr int kWarpgroups = 2;
  static constexpr int kQueries = kWarpgroups * kRows;
  static_assert(kWarpgroups == ScoreTiles::kBlockRows);
  static constexpr int kThreads = tile::kWarpgroupSize * (kWarpgroups + 1);
  static_assert(kRows == tile::kWarpgroupRows);

  using QTile = tile::BoxTile<Element, kRows, kDims.qk>;
  using DoutTile = tile::BoxTile<Element, kRows, kDims.v>;
  using KTile = tile::BoxTile<Element, kRows, kDims.qk>;
  using VTile = tile::BoxTile<Element, kRows, kDims.v>;
  using Scores = tile::WarpgroupAccumulator<kRows>;  // rows are queries
  using Where = ScoreTile<Rows::kQueries, Scores>;
  using BiasTile = std::conditional_t<kHasBoxes, tile::BoxTile<Element, kRows, kRows>, NoBiasMask>;
  using Staged = std::conditional_t<kStagesTerms, StagedBiasMask<Element, Where, true>, NoBiasMask>;
};

// What a warpgroup is told of a tile of keys, where a mask may leave some out.
struct AttendedVisit {
  static constexpr int kSeen = 1;      // its queries attend some of it
  static constexpr int kMasked = 2;    // and the mask hides some
  static constexpr int kNextSeen = 4;  // they attend some of the tile that comes next
  static constexpr int kLast = 8;      // none comes next
  static constexpr int kTileShift = 4;

  int word;

  __device__ __forceinline__ int tile() const { return word >> kTileShift; }
  __device__ __forceinline__ bool has(int flag) const { return (word & flag) != 0; }
};

// What the thread that claims tiles of queries says about one.
struct QueryTileWork {
  static constexpr int kEnd = -1;

  int batch;  // kEnd: there are no more
  int head;
  int key_head;
  int head_of_group;
  int query_begin;  // of the sequence
  int key_begin;
  int num_queries;
  int num_keys;
  int tile;        // of ScoreTiles::kRows queries: the first warpgroup's
  int statistics;  // likewise, in the workspace
  int stored[2];   // each warpgroup's first stored tile
  int begin;       // tiles of keys that any of the queries sees
  int end;
  TileRange own[2];  // those that a warpgroup's see
};

template <class Traits>
struct StoringDqShared {
  static constexpr int kWarpgroups = Traits::kWarpgroups;
  static constexpr int kComputingWarps = 4 * kWarpgroups;
  static constexpr int kWorkStages = 2;

  typename Traits::QTile q[kWarpgroups];
  typename Traits::DoutTile dout[kWarpgroups];
  typename Traits::KTile k[Traits::kTile.key_stages];
  typename Traits::VTile v[Traits::kTile.value_stages];
  typename Traits::BiasTile bias[Traits::kHasBoxes ? Traits::kTile.key_stages : 1][kWarpgroups];  // stages of k
  typename Traits::Staged staged[Traits::kStagesTerms ? kComputingWarps : 1];
  AttendedVisit visits[Traits::kSkipsTiles ? Traits::kTile.key_stages : 1][kWarpgroups];  // what is in k
  QueryTileWork work[kWorkStages];
  tile::RingBarriers<1> q_ring[kWarpgroups];
  tile::RingBarriers<1> dout_ring[kWarpgroups];
  tile::RingBarriers<Traits::kTile.key_stages> k_ring;
  tile::RingBarriers<Traits::kTile.value_stages> v_ring;
  tile::RingBarriers<kWorkStages> work_ring;

  __device__ __forceinline__ void init() {
    for (auto& ring : q_ring) ring.init(4);
    for (auto& ring : dout_ring) ring.init(4);
    k_ring.init(kComputingWarps);
    v_ring.init(kComputingWarps);
    work_ring.init(kComputingWarps);
    ptx::fence_barrier_init();
  }
};

// The products that make dV and dK of stored tiles, some of which a mask may leave out.
template <class ElementType, HeadDims kDimsValue, bool kSkipsTilesValue>
struct StoringProductTraits {
  using Element = ElementType;
  static constexpr HeadDims kDims = kDimsValue;
  static constexpr bool kSkipsTiles = kSkipsTilesValue;
  static constexpr int kRows = ScoreTiles::kRows;  // of a warpgroup's keys, and of a step's queries
  static constexpr ProductTile kTile = product_tile(kDims);
  static constexpr int kWarpgroups = kTile.warpgroups;
  static constexpr int kKeys = kTile.keys();
  static_assert(kKeys == kWarpgroups * kRows);
  static constexpr int kThreads = tile::kWarpgroupSize * (kWarpgroups + 1);
  static constexpr int kColumns = kDims.qk > kDims.v ? kDims.qk : kDims.v;

  using LeftTile = tile::BoxTile<Element, kRows, kRows>;  // of P or dS
  template <int kWidth>
  using RightTile = tile::BoxTile<Element, kRows, kWidth>;  // of dO or Q
};

// What the thread that claims tiles of keys says about one.
template <int kWarpgroups>
struct ProductWork {
  static constexpr int kEnd = -1;

  int batch;  // kEnd: there are no more
  int key_head;
  bool is_dk;
  int query_begin;  // of the sequence
  int key_begin;
  SeenTiles seen;
  int tile;    // of ScoreTiles::kRows keys: the first warpgroup's
  int flags;   // of the first warpgroup's first half
  int sums;    // number of the tile among those of key_sums
  int stored;  // ScoreTiles::first_of_head of the group's first head
  int row;     // of stored tiles: the sequence's first
  int begin;   // tiles of queries of the launch that see any of the keys
  int end;
  TileRange own[kWarpgroups];  // those that see a warpgroup's
};

template <class Traits>
struct StoringProductShared {
  static constexpr int kComputingWarps = 4 * Traits::kWarpgroups;
  static constexpr int kWorkStages = 2;
  static constexpr int kStages = Traits::kTile.stages;
  static constexpr int kEnd = 1 << Traits::kWarpgroups;  // of the visits to a tile of keys; there is nothing in left
  using Work = ProductWork<Traits::kWarpgroups>;
  using RightTile = typename Traits::template RightTile<Traits::kColumns>;

  typename Traits::LeftTile left[kStages][Traits::kWarpgroups];
  RightTile right[kStages];
  int visits[Traits::kSkipsTiles ? kStages : 1];  // which warpgroups have a tile in left, as bits; or kEnd
  Work work[kWorkStages];
  tile::RingBarriers<kStages> ring;
  tile::RingBarriers<kWorkStages> work_ring;

  __device__ __forceinline__ void init() {
    ring.init(kComputingWarps);
    work_ring.init(kComputingWarps);
    ptx::fence_barrier_init();
  }
};

}  // namespace flash_attn_ext::sm90
