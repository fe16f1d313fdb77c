// A consumer's side of the Q pipeline. Where O is staged in Q's rows for the TMA store, a warp releases a stage of Q
// only during the next work tile.
#pragma once

#include "kernels/sm90/forward/traits.h"
#include "ptx/bulk_copy.h"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct QueryStages {
  using Shared = ForwardShared<Traits>;

  Shared& shared;
  typename decltype(Shared::q_pipeline)::State state{};
  bool holds_last = false;  // whether O of the preceding work tile still occupies its stage of Q

  __device__ __forceinline__ void wait() { shared.q_pipeline.consumer_wait(state); }

  // Called when no GEMM reads the work tile's queries any more.
  __device__ __forceinline__ void release() {
    if constexpr (Traits::kConfig.tma_store) return;
    if constexpr (!Traits::kConfig.early_q_release) release_stage();
    state.advance();
  }
  // Called when S of a tile of keys is complete; is_last: whether it is the work tile's last one.
  __device__ __forceinline__ void release_early(bool is_last) const {
    if constexpr (Traits::kConfig.early_q_release) {
      if (is_last) release_stage();
    }
  }

  // Called when every tile of keys was masked for this warpgroup. The queries have arrived, since V follows them.
  __device__ __forceinline__ void drain() {
    if constexpr (Traits::kConfig.tma_store) wait();
    release_previous();
    release_early(true);
    release();
  }

  // Called when a TMA store reads O from the stage of Q.
  __device__ __forceinline__ void keep() {
    if constexpr (!Traits::kConfig.tma_store) return;
    holds_last = true;
    state.advance();
  }
  // Releases the warp's rows of the preceding work tile, whose O the TMA store has read by now.
  __device__ __forceinline__ void release_previous() {
    if constexpr (!Traits::kConfig.tma_store) return;
    if (tile::lane() == 0 && holds_last) {
      ptx::wait_until_read();
      ptx::arrive(shared.q_pipeline.empty[state.stage ^ 1]);
    }
    __syncwarp();
    holds_last = false;
  }

  // Waits until O is in global memory, so that it may be written again and the CTA may end.
  __device__ __forceinline__ void await_output() const {
    if (Traits::kConfig.tma_store && tile::lane() == 0) ptx::wait_until_written();
    __syncwarp();
  }

 private:
  // One thread arrives for the warpgroup: its wait for the GEMM has synchronised the others.
  __device__ __forceinline__ void release_stage() const {
    if (threadIdx.x % tile::kWarpgroupSize == 0) ptx::arrive(shared.q_pipeline.empty[state.stage]);
  }
};

}  // namespace flash_attn_ext::sm90
