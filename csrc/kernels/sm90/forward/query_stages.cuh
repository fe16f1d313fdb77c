// A consumer's stages of Q. In kernels whose O leaves through Q's rows, a warp gives a tile's back during the next one.
#pragma once

#include "kernels/sm90/forward/traits.h"
#include "ptx/bulk_copy.h"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct QueryStages {
  using Shared = ForwardShared<Traits>;

  Shared& shared;
  typename decltype(Shared::q_ring)::Position at{};
  bool holds_last = false;  // whose rows O of the tile before leaves through

  __device__ __forceinline__ void wait() { shared.q_ring.wait_full(at); }

  // No product reads the tile's queries any more.
  __device__ __forceinline__ void release() {
    if constexpr (Traits::kSendsOutput) return;
    if constexpr (!Traits::kGivesQueriesBackEarly) give_back();
    at.advance();
  }
  // S of a tile of keys is there: whether it is the last one.
  __device__ __forceinline__ void release_early(bool is_last) const {
    if constexpr (Traits::kGivesQueriesBackEarly) {
      if (is_last) give_back();
    }
  }

  // Nothing was multiplied by the tile's queries, which have arrived: values come after them.
  __device__ __forceinline__ void skip() {
    if constexpr (Traits::kSendsOutput) wait();
    give_back_last();
    release_early(true);
    release();
  }

  // O is on its way from there.
  __device__ __forceinline__ void keep() {
    if constexpr (!Traits::kSendsOutput) return;
    holds_last = true;
    at.advance();
  }
  // Each warp's rows of the tile before, which O has left by now.
  __device__ __forceinline__ void give_back_last() {
    if constexpr (!Traits::kSendsOutput) return;
    if (tile::lane() == 0 && holds_last) {
      ptx::wait_until_read();
      ptx::arrive(shared.q_ring.empty[at.stage ^ 1]);
    }
    __syncwarp();
    holds_last = false;
  }

  // O is in memory: it may be written again, and the block may end.
  __device__ __forceinline__ void await_output() const {
    if (Traits::kSendsOutput && tile::lane() == 0) ptx::wait_until_written();
    __syncwarp();
  }

 private:
  // One thread of a warpgroup arrives: its wait for the products has synchronised the others.
  __device__ __forceinline__ void give_back() const {
    if (threadIdx.x % tile::kWarpgroupSize == 0) ptx::arrive(shared.q_ring.empty[at.stage]);
  }
};

}  // namespace flash_attn_ext::sm90
