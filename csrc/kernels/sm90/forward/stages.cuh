// A consumer's side of the pipelines of Q, K and V, and its ping-pong with the other consumers.
#pragma once

#include "kernels/sm90/forward/traits.h"
#include "ptx/barrier.h"
#include "ptx/bulk_copy.h"

namespace flash_attn_ext::sm90 {

// Ping-pong scheduling (FlashAttention-3, section 3.1): named barriers order the GEMMs of a CTA's consumer warpgroups,
// so that one warpgroup's softmax overlaps the GEMMs of the others.

// A warpgroup synchronises and arrives once for every tile of keys but the first one of a work tile, also for tiles
// that are masked for its own queries. The last warpgroup arrives once before the first work tile.
template <class Traits>
__device__ __forceinline__ void ping_pong_sync(int warpgroup) {
  if constexpr (Traits::kConfig.ping_pong)
    ptx::sync_named(ForwardBarrier::kMayIssue + warpgroup, 2 * tile::kWarpgroupSize);
}

template <class Traits>
__device__ __forceinline__ void ping_pong_arrive(int warpgroup) {
  if constexpr (Traits::kConfig.ping_pong) {
    const int next = warpgroup + 1 == Traits::kConfig.warpgroups ? 0 : warpgroup + 1;
    ptx::arrive_named(ForwardBarrier::kMayIssue + next, 2 * tile::kWarpgroupSize);
  }
}

// The K and V pipelines: waits for full stages and releases them in order.
template <class Traits>
struct KeyStages {
  using Shared = ForwardShared<Traits>;
  using State = typename decltype(Shared::k_pipeline)::State;

  Shared& shared;
  const int warpgroup;
  State k{};
  State v{};

  // What the QK GEMM adds.
  __device__ __forceinline__ auto key_bias() const {
    if constexpr (Traits::kConfig.has_key_bias()) {
      return tile::SharedAugmentedStep(shared.key_bias.factors, shared.key_bias.columns[0], k.stage, 0);
    } else {
      return tile::NoAugmentedStep{};
    }
  }

  __device__ __forceinline__ void wait_keys() { shared.k_pipeline.consumer_wait(k); }
  __device__ __forceinline__ void wait_values() { shared.v_pipeline.consumer_wait(v); }
  __device__ __forceinline__ void release_keys() { release(shared.k_pipeline, k); }
  __device__ __forceinline__ void release_values() { release(shared.v_pipeline, v); }

  // In kernels for a cache, clears the rows of V after a tile's last key. What a cache holds there may be NaN, and 0
  // times NaN is NaN. Each warpgroup clears them before its own GEMM, so that it waits for no other one; all of them
  // write zeros.
  __device__ __forceinline__ void clear_values_after(int keys) {
    if constexpr (Traits::kConfig.kv_cache) {
      if (keys >= Traits::kConfig.block_n) return;
      wait_values();
      shared.v[v.stage].clear_rows(keys, static_cast<int>(threadIdx.x) % tile::kWarpgroupSize, tile::kWarpgroupSize);
      ptx::fence_stores();
      sync_warpgroup();
    }
  }

  __device__ __forceinline__ void sync_warpgroup() const {
    ptx::sync_named(ForwardBarrier::kWarpgroup + warpgroup, tile::kWarpgroupSize);
  }

  // Drains a tile that is masked for this warpgroup's rows but not for another's; its keys have arrived. No GEMM
  // synchronises the warps here, so without the warpgroup barrier a slow warp could miss the phase that it waits for.
  __device__ __forceinline__ void drain_keys(bool in_ping_pong) {
    sync_warpgroup();
    if (in_ping_pong) {
      ping_pong_sync<Traits>(warpgroup);
      ping_pong_arrive<Traits>(warpgroup);
    }
    release_keys();
  }
  __device__ __forceinline__ void drain_values(int count) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      wait_values();
      sync_warpgroup();
      release_values();
    }
  }

 private:
  // One thread arrives for the warpgroup: its wait for the GEMM has synchronised the others.
  template <class Barriers>
  __device__ __forceinline__ static void release(Barriers& pipeline, State& state) {
    if (threadIdx.x % tile::kWarpgroupSize == 0) ptx::arrive(pipeline.empty[state.stage]);
    state.advance();
  }
};

// The Q pipeline. Where O is staged in Q's rows for the TMA store, a warp releases a stage of Q only during the next
// work tile.
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

  // Called when every tile of keys was masked for this warpgroup. With one producer the queries have arrived, since V
  // follows them. With two they may not have, and a stage must not be released before it is full. Without the warpgroup
  // barrier a slow warp could miss the phase that it waits for, where one thread releases the stage.
  __device__ __forceinline__ void drain() {
    if constexpr (Traits::kConfig.tma_store) {
      wait();
    } else if constexpr (Traits::kConfig.kv_cache) {
      wait();
      const int warpgroup = static_cast<int>(threadIdx.x) / tile::kWarpgroupSize - 1;
      ptx::sync_named(ForwardBarrier::kWarpgroup + warpgroup, tile::kWarpgroupSize);
    }
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
