// A consumer's side of the K and V pipelines: it waits for full stages and releases them in order.
#pragma once

#include "kernels/sm90/forward/ping_pong.cuh"
#include "kernels/sm90/forward/traits.h"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct KeyStages {
  using Shared = ForwardShared<Traits>;
  using State = typename decltype(Shared::k_pipeline)::State;

  static constexpr int kWarpgroupBarrier = 8;  // of warpgroup 0, the others follow; ping_pong.cuh has barriers below 8

  Shared& shared;
  const int warpgroup;
  State k{};
  State v{};

  __device__ __forceinline__ void wait_keys() { shared.k_pipeline.consumer_wait(k); }
  __device__ __forceinline__ void wait_values() { shared.v_pipeline.consumer_wait(v); }
  __device__ __forceinline__ void release_keys() { release(shared.k_pipeline, k); }
  __device__ __forceinline__ void release_values() { release(shared.v_pipeline, v); }

  __device__ __forceinline__ void sync_warpgroup() const {
    ptx::sync_named(kWarpgroupBarrier + warpgroup, tile::kWarpgroupSize);
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

}  // namespace flash_attn_ext::sm90
