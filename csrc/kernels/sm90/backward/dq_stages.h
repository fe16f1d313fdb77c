// Stages of dQ on its way to memory, which the dQ warpgroup fills and two adders empty.
#pragma once

#include "tile/sm90/ring.h"

namespace flash_attn_ext::sm90 {

inline constexpr int kDqStages = 2;
inline constexpr int kDqAdders = 2;

// A visit, of which an adder is to add dQ to memory.
struct PendingSum {
  int sums;  // their number in the workspace; kEnd: there are no more
  int place;
  static constexpr int kEnd = -1;
};

// A stage holds dQ of a visit, and belongs to an adder.
struct WholeDqRing : tile::RingBarriers<kDqStages> {
  __device__ __forceinline__ void init(int warps) { RingBarriers::init(1, warps); }
};

// A stage holds a piece of it.
struct AnnouncedDqRing : tile::RingBarriers<kDqStages> {
  ptx::Barrier announced[kDqAdders];
  ptx::Barrier fetched;  // sums that a last visitor takes

  __device__ __forceinline__ void init(int warps) {
    RingBarriers::init(1, warps);
    for (auto& barrier : announced) ptx::init_barrier(barrier, warps);
    ptx::init_barrier(fetched, 1);
  }
};

}  // namespace flash_attn_ext::sm90
