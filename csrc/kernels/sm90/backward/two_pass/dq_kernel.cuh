// The dQ kernel of the two-pass backward pass on Hopper: it computes dQ, and materialises P and dS for the GEMM kernel
// of dV and dK (docs/kernels/sm90_backward_two_pass.md). It is for large head dims, and for scores that more than a
// scale changes.
//
// Grid: persistent CTAs, one per SM. Each fetches work tiles (128 queries of a head) until none is left.
//
//  Warpgroup 0         Producer: one thread fetches work tiles and issues all TMA copies (query_producer.cuh).
//  Warpgroups 1 and 2  dQ of 64 queries each, in registers (query_warpgroup.cuh).
//
// Shared memory: Q and dO of a work tile, pipelines of K and of V, biases and masks (TwoPassDqShared).
#pragma once

#include "kernels/sm90/backward/two_pass/query_producer.cuh"
#include "kernels/sm90/backward/two_pass/query_warpgroup.cuh"
#include "ptx/dependent_launch.h"
#include "ptx/elect.h"
#include "ptx/register_budget.h"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct TwoPassDqKernel {
  using Shared = TwoPassDqShared<Traits>;
  static constexpr int kThreads = Traits::kThreads;
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    two_pass_dq_kernel(const __grid_constant__ TwoPassArguments args) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<TwoPassDqShared<Traits>*>(shared_memory);
  constexpr int kRegisters = Traits::kConfig.consumer_registers();
  constexpr int kCopyRegisters = Traits::kConfig.producer_registers();
  static_assert(has_registers(Traits::kWarpgroups, kRegisters, kCopyRegisters));
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / tile::kWarpgroupSize);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  ptx::wait_for_kernel_before();
  if (warpgroup == 0) {
    ptx::release_registers<kCopyRegisters>();
    if (uniform(tile::warp()) == 0 && ptx::elect()) QueryProducer<Traits>{args, shared}.run();
  } else {
    ptx::acquire_registers<kRegisters>();
    if constexpr (Traits::kStagesBiasMask) {
      QueryWarpgroup<Traits>{args, shared, warpgroup - 1, {args, {shared.staged[tile::warp() - 4]}}}.run();
    } else {
      QueryWarpgroup<Traits>{args, shared, warpgroup - 1, QueryScores<Traits>{args}}.run();
    }
  }
}

}  // namespace flash_attn_ext::sm90
