// A consumer's stages of K and V: it waits for them to be filled, and gives them back in the order in which they came.
#pragma once

#include "kernels/sm90/forward/traits.h"
#include "kernels/sm90/forward/turns.cuh"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct KeyStages {
  using Shared = ForwardShared<Traits>;
  using Ring = typename decltype(Shared::k_ring)::Position;

  static constexpr int kMeetBarrier = 8;  // and those of the other warpgroups; turns.cuh has others

  Shared& shared;
  const int warpgroup;
  Ring k{};
  Ring v{};

  __device__ __forceinline__ void wait_keys() { shared.k_ring.wait_full(k); }
  __device__ __forceinline__ void wait_values() { shared.v_ring.wait_full(v); }
  __device__ __forceinline__ void release_keys() { release(shared.k_ring, k); }
  __device__ __forceinline__ void release_values() { release(shared.v_ring, v); }

  __device__ __forceinline__ void meet() const { ptx::sync_named(kMeetBarrier + warpgroup, tile::kWarpgroupSize); }

  // Tiles that only other warpgroups' rows see; keys have been waited for. Without products that synchronise the warps,
  // a slow one could miss the phase that it waits for.
  __device__ __forceinline__ void skip_keys(bool has_turn) {
    meet();
    if (has_turn) {
      take_turn<Traits>(warpgroup);
      pass_turn<Traits>(warpgroup);
    }
    release_keys();
  }
  __device__ __forceinline__ void skip_values(int count) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      wait_values();
      meet();
      release_values();
    }
  }

 private:
  // One thread of a warpgroup arrives: its wait for the products has synchronised the others.
  template <class Barriers>
  __device__ __forceinline__ static void release(Barriers& ring, Ring& at) {
    if (threadIdx.x % tile::kWarpgroupSize == 0) ptx::arrive(ring.empty[at.stage]);
    at.advance();
  }
};

}  // namespace flash_attn_ext::sm90
