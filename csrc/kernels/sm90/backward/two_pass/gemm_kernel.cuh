// The GEMM kernel of the two-pass backward pass on Hopper: dV = P^T dO and dK = scale * dS^T Q, from the tiles of P and
// dS that the dQ kernel stored (docs/kernels/sm90_backward_two_pass.md).
//
// Grid: persistent CTAs, one per SM. Each fetches work tiles (a key tile of one gradient) until none is left.
//
//  Warpgroup 0  Producer: one thread fetches work tiles and issues all copies (gemm_producer.cuh).
//  The others   64 keys each: sums over all queries of all heads of a KV group, in registers (gemm_warpgroup.cuh).
//
// Shared memory: a pipeline of stored tiles and of dO or Q (TwoPassGemmShared).
#pragma once

#include "kernels/sm90/backward/two_pass/gemm_producer.cuh"
#include "kernels/sm90/backward/two_pass/gemm_warpgroup.cuh"
#include "ptx/dependent_launch.h"
#include "ptx/elect.h"
#include "ptx/register_budget.h"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct TwoPassGemmKernel {
  using Shared = TwoPassGemmShared<Traits>;
  static constexpr int kThreads = Traits::kThreads;
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    two_pass_gemm_kernel(const __grid_constant__ TwoPassArguments args) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<TwoPassGemmShared<Traits>*>(shared_memory);
  constexpr GemmTile kTile = Traits::kTile;
  static_assert(has_registers(kTile.warpgroups, kTile.registers, kTile.copy_registers));
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / tile::kWarpgroupSize);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  ptx::wait_for_kernel_before();
  if (warpgroup == 0) {
    ptx::release_registers<kTile.copy_registers>();
    if (uniform(tile::warp()) == 0 && ptx::elect()) GemmProducer<Traits>{args, shared}.run();
  } else {
    ptx::acquire_registers<kTile.registers>();
    GemmWarpgroup<Traits>{args, shared, warpgroup - 1}.run();
  }
}

}  // namespace flash_attn_ext::sm90
