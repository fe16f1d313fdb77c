// dV = P^T dO and dK = scale * dS^T Q on Hopper, from the tiles of P and dS that the dQ kernel stored
// (docs/kernels/sm90_backward_storing.md).
//
// Grid: as many blocks as multiprocessors. Each claims tiles of keys of one gradient until none is left.
// Warpgroup 0: a thread claims tiles and starts all copies (product_producer.cuh).
// The others: 64 keys each; sums over all queries of all heads of a group, in registers (product_warpgroup.cuh).
// Shared memory: stages of stored tiles and of dO or Q (StoringProductShared).
#pragma once

#include "kernels/sm90/backward_storing/product_producer.cuh"
#include "kernels/sm90/backward_storing/product_warpgroup.cuh"
#include "ptx/dependent_launch.h"
#include "ptx/elect.h"
#include "ptx/register_budget.h"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct StoringProductKernel {
  using Shared = StoringProductShared<Traits>;
  static constexpr int kThreads = Traits::kThreads;
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    storing_product_kernel(const __grid_constant__ StoringArguments args) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<StoringProductShared<Traits>*>(shared_memory);
  constexpr ProductTile kTile = Traits::kTile;
  static_assert(has_registers(kTile.warpgroups, kTile.registers, kTile.copy_registers));
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / tile::kWarpgroupSize);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  ptx::wait_for_kernel_before();
  if (warpgroup == 0) {
    ptx::release_registers<kTile.copy_registers>();
    if (uniform(tile::warp()) == 0 && ptx::elect()) ProductProducer<Traits>{args, shared}.run();
  } else {
    ptx::acquire_registers<kTile.registers>();
    ProductWarpgroup<Traits>{args, shared, warpgroup - 1}.run();
  }
}

}  // namespace flash_attn_ext::sm90
