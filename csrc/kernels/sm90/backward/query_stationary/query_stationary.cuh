// The query-stationary backward pass on Hopper: dQ, dK and dV of at most 128 queries that see all of many keys
// (docs/kernels/sm90_backward_query_stationary.md).
//
// Grid: persistent CTAs, at most one per SM. Each has a stream-K range of tiles of 64 keys (schedule/tile_splits.h). Q
// and dO of a pair stay in shared memory and dQ in registers, and K and V stream past. Each key is read once, and its
// dK and dV are written once. Bound: memory.
//
//  Warpgroup 0         Producer: one thread issues all TMA copies (producer.cuh).
//  Warpgroups 1 and 2  64 queries each (query_warpgroup.cuh).
//
// A CTA stores its partial dQ of each pair in float32, and sum_dq_splits.cuh adds these up in a fixed order. So no CTA
// waits for another one.
//
// Shared memory: Q and dO, pipelines of K and of V, and two stages of P and dS (QueryStationaryShared).
#pragma once

#include "kernels/sm90/backward/query_stationary/producer.cuh"
#include "kernels/sm90/backward/query_stationary/query_warpgroup.cuh"
#include "ptx/dependent_launch.h"
#include "ptx/elect.h"
#include "ptx/register_budget.h"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct QueryStationaryKernel {
  using Shared = QueryStationaryShared<Traits>;
  static constexpr int kThreads = Traits::kThreads;
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    query_stationary_kernel(const __grid_constant__ QueryStationaryArguments args) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<QueryStationaryShared<Traits>*>(shared_memory);
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / tile::kWarpgroupSize);
  if (threadIdx.x == 0) shared.init(args.work_list);
  __syncthreads();
  ptx::allow_dependent_launch();  // the CTAs of the next kernel find no room before these end
  ptx::wait_for_kernel_before();
  if (warpgroup == 0) {
    ptx::release_registers<Traits::kConfig.producer_registers>();
    if (tile::warp() == 0 && ptx::elect()) QueryStationaryProducer<Traits>{args, shared}.run();
  } else {
    ptx::acquire_registers<Traits::kConfig.consumer_registers>();
    QueryStationaryWarpgroup<Traits>{args, shared, warpgroup - 1}.run();
  }
}

}  // namespace flash_attn_ext::sm90
