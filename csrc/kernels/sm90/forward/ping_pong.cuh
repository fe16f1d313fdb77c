// Ping-pong scheduling (FlashAttention-3, section 3.1): named barriers order the GEMMs of a CTA's consumer warpgroups,
// so that one warpgroup's softmax overlaps the GEMMs of the others.
#pragma once

#include "kernels/sm90/forward/traits.h"
#include "ptx/barrier.h"

namespace flash_attn_ext::sm90 {

inline constexpr int kPingPongBarrier = 1;  // the named barrier of warpgroup 0; barrier 0 is __syncthreads

// A warpgroup synchronises and arrives once for every tile of keys but the first one of a work tile, also for tiles
// that are masked for its own queries. The last warpgroup arrives once before the first work tile.
template <class Traits>
__device__ __forceinline__ void ping_pong_sync(int warpgroup) {
  if constexpr (Traits::kConfig.ping_pong) ptx::sync_named(kPingPongBarrier + warpgroup, 2 * tile::kWarpgroupSize);
}

template <class Traits>
__device__ __forceinline__ void ping_pong_arrive(int warpgroup) {
  if constexpr (Traits::kConfig.ping_pong) {
    const int next = warpgroup + 1 == Traits::kConfig.warpgroups ? 0 : warpgroup + 1;
    ptx::arrive_named(kPingPongBarrier + next, 2 * tile::kWarpgroupSize);
  }
}

}  // namespace flash_attn_ext::sm90
