// What a backward kernel of few queries is compiled for, and what lies in its shared memory.
#pragma once

#include "kernels/sm90/backward_few_queries/arguments.h"
#include "kernels/tile_config_few_queries.h"
#include "tile/sm90/gemm.h"
#include "tile/sm90/ring.h"

namespace flash_attn_ext::sm90 {

template <class ElementType, HeadDims kDimsValue>
struct FewQueriesTraits {
  using Element = ElementType;
  static constexpr HeadDims kDims = kDimsValue;
  static constexpr int kKeys = kFewQueriesKeys;
  static constexpr int kQueries = kFewQueries;
  static constexpr int kWarpgroups = kQueries / tile::kWarpgroupRows;  // that compute; one more starts the copies
  static constexpr int kComputingThreads = kWarpgroups * tile::kWarpgroupSize;
  static constexpr int kThreads = kComputingThreads + tile::kWarpgroupSize;
  static constexpr FewQueriesTile kTile = few_queries_tile(kDims);
  // One warpgroup has dV of a tile of keys, the other one dK.
  static_assert(kWarpgroups == 2 && kKeys == tile::kWarpgroupRows && kDims.qk == kDims.v);
  static_assert(has_registers(kWarpgroups, kTile.registers, kTile.copy_registers));

  using QueryTile = tile::BoxTile<Element, kQueries, kDims.qk>;  // Q and dO
  using KeyTile = tile::BoxTile<Element, kKeys, kDims.qk>;       // K and V, dK and dV
  using ScoreTile = tile::BoxTile<Element, kQueries, kKeys>;     // P and dS
  using Scores = tile::WarpgroupAccumulator<kKeys>;              // rows are queries
  using Staging = QueryTile;                                     // of dV and dK
  using Sums = tile::WarpgroupAccumulator<kDims.qk>;             // of dQ, and of dV or dK
  static constexpr int kPartFloats = kQueries * kDims.qk;        // of dQ
};

// Later 64 rows of dV and 64 of dK, on their way to memory, each warp's where it had its rows of P and dS.
template <class Traits>
struct ScoreStage {
  typename Traits::ScoreTile weights;  // P
  typename Traits::ScoreTile dscores;

  __device__ __forceinline__ typename Traits::Staging& staging() {
    static_assert(sizeof(typename Traits::Staging) <= sizeof(ScoreStage));
    return reinterpret_cast<typename Traits::Staging&>(*this);
  }
};

template <class Traits>
struct FewQueriesShared {
  static constexpr int kComputingWarps = 4 * Traits::kWarpgroups;
  static constexpr int kStages = Traits::kTile.key_stages;
  static constexpr int kScoreStages = 2;

  typename Traits::QueryTile q;
  typename Traits::QueryTile dout;
  typename Traits::KeyTile k[kStages];
  typename Traits::KeyTile v[kStages];
  ScoreStage<Traits> scores[kScoreStages];
  Stretch stretch;                   // the block's
  tile::RingBarriers<1> query_ring;  // Q and dO
  tile::RingBarriers<kStages> k_ring;
  tile::RingBarriers<kStages> v_ring;

  __device__ __forceinline__ void init(const LineShares& line) {
    stretch = {static_cast<int>(line.begin_of(blockIdx.x)), static_cast<int>(line.begin_of(blockIdx.x + 1))};
    query_ring.init(kComputingWarps);
    k_ring.init(kComputingWarps);
    v_ring.init(kComputingWarps);
    ptx::fence_barrier_init();
  }
};

}  // namespace flash_attn_ext::sm90
