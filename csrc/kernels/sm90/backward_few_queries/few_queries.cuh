// dQ, dK and dV of at most 128 queries that see all of many keys (docs/kernels/sm90_backward_few_queries.md).
//
// Grid: at most as many blocks as multiprocessors. Each takes a stretch of tiles of 64 keys (schedule/item_parts.h). Q
// and dO of its pair stay in shared memory, dQ in registers, and K and V stream past: each is read once, and dK and dV
// are written once. Bound: memory. Warpgroup 0: a thread starts all copies (producer.cuh). Warpgroups 1 and 2: 64
// queries each (query_warpgroup.cuh). dQ of each block and pair goes to memory in float32, and sum_parts.cuh adds these
// up in a fixed order. Shared memory: Q and dO, stages of K and V, and of P and dS (FewQueriesShared).
#pragma once

#include "kernels/sm90/backward_few_queries/producer.cuh"
#include "kernels/sm90/backward_few_queries/query_warpgroup.cuh"
#include "ptx/dependent_launch.h"
#include "ptx/elect.h"
#include "ptx/register_budget.h"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct FewQueriesKernel {
  using Shared = FewQueriesShared<Traits>;
  static constexpr int kThreads = Traits::kThreads;
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    few_queries_kernel(const __grid_constant__ FewQueriesArguments args) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<FewQueriesShared<Traits>*>(shared_memory);
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / tile::kWarpgroupSize);
  if (threadIdx.x == 0) shared.init(args.line);
  __syncthreads();
  ptx::allow_dependent_launch();  // whose blocks find no room before these end
  ptx::wait_for_kernel_before();
  if (warpgroup == 0) {
    ptx::release_registers<Traits::kTile.copy_registers>();
    if (tile::warp() == 0 && ptx::elect()) FewQueriesProducer<Traits>{args, shared}.run();
  } else {
    ptx::acquire_registers<Traits::kTile.registers>();
    FewQueriesWarpgroup<Traits>{args, shared, warpgroup - 1}.run();
  }
}

}  // namespace flash_attn_ext::sm90
