// What a kernel whose tile of keys holds all keys of a sequence is compiled for, and what lies in its shared memory.
#pragma once

#include "kernels/sm90/forward_all_keys/arguments.h"
#include "kernels/tile_config_sm90.h"
#include "tile/sm90/ring.h"

namespace flash_attn_ext::sm90 {

template <class ElementType, int kKeysValue>
struct AllKeysTraits {
  using Element = ElementType;
  static constexpr HeadDims kDims = kAllKeysHeadDims;
  static constexpr int kKeys = kKeysValue;
  static constexpr AllKeysTile kTile = all_keys_tile(kKeys);
  static constexpr ForwardRegisters kRegisters = all_keys_registers(kTile);
  static_assert(has_registers(kTile.warpgroups, kRegisters.consumer, kRegisters.producer));
  static constexpr int kWarps = 4 * kTile.warpgroups;  // that compute
  static constexpr int kThreads = tile::kWarpgroupSize * (kTile.warpgroups + 1);
  static constexpr int kPartKeys = kKeys / kTile.parts;  // whose scores registers hold at a time

  using QTile = tile::BoxTile<Element, tile::kWarpgroupRows, kDims.qk>;
  using KTile = tile::BoxTile<Element, kKeys, kDims.qk>;
  using VTile = tile::BoxTile<Element, kKeys, kDims.v>;
  using KPart = tile::BoxTile<Element, kPartKeys, kDims.qk>;
  using VPart = tile::BoxTile<Element, kPartKeys, kDims.v>;
  using OutTile = tile::BoxTile<Element, tile::kWarpgroupRows, kDims.v>;
  using Scores = tile::WarpgroupAccumulator<kPartKeys>;
  using Output = tile::WarpgroupAccumulator<kDims.v>;
};

// A unit takes a stage of keys and values; each warpgroup has stages of queries of its own.
template <class Traits>
struct AllKeysShared {
  static constexpr int kStages = Traits::kTile.key_stages;
  static constexpr int kQueryStages = Traits::kTile.query_stages;
  static constexpr int kWarpgroups = Traits::kTile.warpgroups;
  using Units = tile::RingBarriers<kStages>;
  using QueryRing = tile::RingBarriers<kQueryStages>;

  typename Traits::KTile k[kStages];
  typename Traits::VTile v[kStages];
  typename Traits::QTile q[kWarpgroups][kQueryStages];
  typename Traits::OutTile out[kWarpgroups];  // rows on their way to memory
  Unit unit[kStages];
  Units units;  // full: it is known, and has no queries at the end; empty: nobody reads it, its keys or its values
  ptx::Barrier k_full[kStages];
  ptx::Barrier v_full[kStages];
  QueryRing queries[kWarpgroups];
  bool any_flagged[Traits::kWarps];  // some of the warp's rows

  __device__ __forceinline__ void init() {
    units.init(Traits::kWarps + 1);  // and the thread that copies
    for (int i = 0; i < kStages; ++i) {
      ptx::init_barrier(k_full[i], 1);
      ptx::init_barrier(v_full[i], 1);
    }
    for (auto& ring : queries) ring.init(1);
    for (auto& flag : any_flagged) flag = false;
    ptx::fence_barrier_init();
  }
};

}  // namespace flash_attn_ext::sm90
