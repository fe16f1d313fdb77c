// The two main kernels of the two-pass backward pass on Hopper (docs/kernels/sm90_backward_two_pass.md).
// config/two_pass.h says which calls take it. Both kernels have persistent CTAs, one per SM. Each fetches work tiles
// until none is left.
//
// The dQ kernel computes dQ, and materialises P and dS for the GEMM kernel. A work tile has 128 queries of a head.
//
//  Warpgroup 0         Producer: one thread fetches work tiles and issues all TMA copies (query_producer.cuh).
//  Warpgroups 1 and 2  dQ of 64 queries each, in registers (query_warpgroup.cuh).
//
// Its shared memory: Q and dO of a work tile, pipelines of K and of V, biases and masks (TwoPassDqShared).
//
// The GEMM kernel computes dV = P^T dO and dK = scale * dS^T Q, from the tiles of P and dS that the dQ kernel stored. A
// work tile is a key tile of one gradient.
//
//  Warpgroup 0  Producer: one thread fetches work tiles and issues all copies (gemm_producer.cuh).
//  The others   64 keys each: sums over all queries of all heads of a KV group, in registers (gemm_warpgroup.cuh).
//
// Its shared memory: a pipeline of materialised tiles and of dO or Q (TwoPassGemmShared).
#pragma once

#include "kernels/sm90/backward/two_pass/gemm_producer.cuh"
#include "kernels/sm90/backward/two_pass/gemm_warpgroup.cuh"
#include "kernels/sm90/backward/two_pass/query_producer.cuh"
#include "kernels/sm90/backward/two_pass/query_warpgroup.cuh"
#include "kernels/sm90/kernel.cuh"

namespace flash_attn_ext::sm90 {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    two_pass_dq_kernel(const __grid_constant__ TwoPassArguments args) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<TwoPassDqShared<Traits>*>(shared_memory);
  constexpr int kRegisters = Traits::kConfig.consumer_registers();
  constexpr int kCopyRegisters = Traits::kConfig.producer_registers();
  static_assert(has_registers(Traits::kWarpgroups, kRegisters, kCopyRegisters));
  // run_roles() would change the instructions here: its consumer has to make its QueryScores itself.
  const int warpgroup = warpgroup_index();
  init_barriers(shared);
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

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    two_pass_gemm_kernel(const __grid_constant__ TwoPassArguments args) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<TwoPassGemmShared<Traits>*>(shared_memory);
  constexpr GemmTile kTile = Traits::kTile;
  static_assert(has_registers(kTile.warpgroups, kTile.consumer_registers, kTile.producer_registers));
  run_roles<GemmProducer<Traits>, GemmWarpgroup<Traits>,
            RoleRegisters{kTile.producer_registers, kTile.consumer_registers}>(args, shared);
}

}  // namespace flash_attn_ext::sm90
