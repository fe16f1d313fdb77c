// Forward pass on Hopper where all keys of a sequence are one tile: O = softmax(scale Q K^T) V and its LSE (Dao 2023,
// "FlashAttention-2", algorithm 1, without its loop over keys).
//
// Grid: one persistent CTA per SM, with a static tile scheduler. A work tile is some tiles of 64 queries of one head,
// and all of its keys and values. Warpgroup 0 is the producer: one thread publishes work tiles, another one issues all
// TMA loads, and two warps write the key bias, if there is one (producer.cuh). The consumer warpgroups take the tiles
// of queries round-robin, each at its own pace (consumer.cuh). Shared memory: pipelines of a work tile's K and V, and
// of Q for each warpgroup (SingleTileShared).
#pragma once

#include "kernels/sm90/forward/single_tile/consumer.cuh"
#include "kernels/sm90/forward/single_tile/producer.cuh"
#include "kernels/sm90/kernel.cuh"

namespace flash_attn_ext::sm90 {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    single_tile_kernel(const __grid_constant__ SingleTileArguments args) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<SingleTileShared<Traits>*>(shared_memory);
  const int warpgroup = warpgroup_index();
  init_barriers(shared);
  prefetch_descriptors({&args.q, &args.k, &args.v});
  __syncthreads();
  ptx::wait_for_kernel_before();
  if (warpgroup == 0) {
    ptx::release_registers<Traits::kRegisters.producer>();
    if (threadIdx.x == 0) SingleTileProducer<Traits>{args, shared}.run();
    if (threadIdx.x / tile::kWarpSize == 1) SingleTileScheduler<Traits>{args, shared}.start();
    if constexpr (Traits::kKeyBias) {
      const int warp = static_cast<int>(threadIdx.x) / tile::kWarpSize - 2;
      if (warp >= 0 && warp < Traits::kKeyBiasWarps) KeyBiasWriter<Traits>{args, shared, warp}.run();
    }
  } else {
    ptx::acquire_registers<Traits::kRegisters.consumer>();
    SingleTileConsumer<Traits>{.args = args, .shared = shared, .warpgroup = warpgroup - 1}.run();
  }
}

}  // namespace flash_attn_ext::sm90
