// Forward pass on Hopper where all keys of a sequence are one tile: O = softmax(scale Q K^T) V and its LSE (Dao 2023,
// "FlashAttention-2", algorithm 1, without its loop over keys).
//
// Grid: a resident block per multiprocessor, which goes from unit to unit: some tiles of 64 queries of a head, and its
// keys and values.
// Warpgroup 0: one thread says what there is to do, one starts all copies (producer.cuh). The others take tiles of
// queries in turn, each at its own pace (consumer.cuh).
// Shared memory: stages of a unit's keys and values, and of queries for each warpgroup (AllKeysShared).
#pragma once

#include "kernels/sm90/forward_all_keys/consumer.cuh"
#include "kernels/sm90/forward_all_keys/producer.cuh"
#include "ptx/dependent_launch.h"
#include "ptx/register_budget.h"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct AllKeysKernel {
  using Shared = AllKeysShared<Traits>;
  static constexpr int kThreads = Traits::kThreads;
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) all_keys_kernel(const __grid_constant__ AllKeysArguments args) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<AllKeysShared<Traits>*>(shared_memory);
  const int warpgroup = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / tile::kWarpgroupSize, 0);
  if (threadIdx.x == 0) shared.init();
  if (threadIdx.x == 2 * tile::kWarpSize) {
    for (const OperandMap* operand : {&args.q, &args.k, &args.v}) ptx::prefetch_map(operand->map);
  }
  __syncthreads();
  ptx::wait_for_kernel_before();
  if (warpgroup == 0) {
    ptx::release_registers<Traits::kRegisters.producer>();
    if (threadIdx.x == 0) AllKeysProducer<Traits>{args, shared}.run();
    if (threadIdx.x / tile::kWarpSize == 1) AllKeysScheduler<Traits>{args, shared}.start();
  } else {
    ptx::acquire_registers<Traits::kRegisters.consumer>();
    AllKeysConsumer<Traits>{.args = args, .shared = shared, .warpgroup = warpgroup - 1}.run();
  }
}

}  // namespace flash_attn_ext::sm90
