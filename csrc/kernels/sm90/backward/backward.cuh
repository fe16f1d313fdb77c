// dQ, dK and dV in one pass on Hopper: S, dP, dV, dK and dQ, five products of tiles (docs/kernels/sm90_backward.md).
//
// Grid: as many blocks as multiprocessors. Each claims tiles of keys (batch entry, key head, 128 keys) until none is
// left, in the order of plan/visit_order.h.
// Warpgroup 0: a thread claims tiles, one starts all copies (copies.cuh), two add parts of dQ to memory
// (dq_adders.cuh).
// Warpgroups 1 and 2: dK and dV of 64 keys each, in registers (key_warpgroup.cuh).
// Warpgroup 3: dQ of each tile of queries from dS, which the two leave in shared memory, and draws of dropout
// (dq_warpgroup.cuh). The first visitor of a tile of queries stores its part, others add theirs in a fixed order, the
// last one writes dQ.
// Shared memory: stages of K and V, of Q and dO, of dS, and of parts of dQ on their way to memory (BackwardShared).
#pragma once

#include "kernels/sm90/backward/copies.cuh"
#include "kernels/sm90/backward/dq_adders.cuh"
#include "kernels/sm90/backward/dq_warpgroup.cuh"
#include "kernels/sm90/backward/key_warpgroup.cuh"
#include "kernels/sm90/uniform.h"
#include "ptx/dependent_launch.h"
#include "ptx/elect.h"
#include "ptx/register_budget.h"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct BackwardKernel {
  using Shared = BackwardShared<Traits>;
  static constexpr int kThreads = Traits::kThreads;
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) backward_kernel(const __grid_constant__ BackwardArguments args) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<BackwardShared<Traits>*>(shared_memory);
  const int warpgroup = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / tile::kWarpgroupSize, 0);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  ptx::allow_dependent_launch();  // whose blocks find no registers before these end
  ptx::wait_for_kernel_before();
  if (warpgroup == 0) {
    ptx::release_registers<Traits::kRegisters.copy>();
    const int warp = uniform(tile::warp());
    if (!ptx::elect()) return;
    if (warp == 0) BackwardProducer<Traits>{args, shared}.run();
    if (warp == 1) BackwardScheduler<Traits>{args, shared}.run();
    if (warp >= 2) DqAdder<Traits>{args, shared, warp - 2}.run();
  } else if (warpgroup <= Traits::kWarpgroups) {
    ptx::acquire_registers<Traits::kRegisters.key>();
    KeyWarpgroup<Traits>{args, shared, warpgroup - 1}.run();
  } else {
    ptx::release_registers<Traits::kRegisters.query>();
    DqWarpgroup<Traits>{args, shared}.run();
  }
}

}  // namespace flash_attn_ext::sm90
