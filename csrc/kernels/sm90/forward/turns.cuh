// The turns in which a block's warpgroups start their products, so that one's softmax runs beside the others' products.
#pragma once

#include "kernels/sm90/forward/traits.h"
#include "ptx/barrier.h"

namespace flash_attn_ext::sm90 {

inline constexpr int kTurnBarrier = 1;  // of warpgroup 0: a named one, of which 0 is __syncthreads

// Each warpgroup takes a turn for every tile of keys but the first of a tile of queries, also for those that its own
// queries do not see. The last warpgroup starts by passing one on.
template <class Traits>
__device__ __forceinline__ void take_turn(int warpgroup) {
  if constexpr (Traits::kTile.takes_turns) ptx::sync_named(kTurnBarrier + warpgroup, 2 * tile::kWarpgroupSize);
}

template <class Traits>
__device__ __forceinline__ void pass_turn(int warpgroup) {
  if constexpr (Traits::kTile.takes_turns) {
    const int next = warpgroup + 1 == Traits::kTile.warpgroups ? 0 : warpgroup + 1;
    ptx::arrive_named(kTurnBarrier + next, 2 * tile::kWarpgroupSize);
  }
}

}  // namespace flash_attn_ext::sm90
