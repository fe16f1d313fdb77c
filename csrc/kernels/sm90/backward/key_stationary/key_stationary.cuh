// The key-stationary backward pass on Hopper: dQ, dK and dV in one kernel, with five GEMMs in each iteration: S, dP,
// dV, dK and dQ (docs/kernels/sm90_backward.md).
//
// Grid: persistent CTAs, one per SM. Each fetches work tiles (batch entry, key head, 128 keys) until none is left. For
// each of them K, V, dK and dV stay, and the CTA iterates over the tiles of 64 queries that see the keys.
// schedule/loop_order.h explains the loop order and the semaphores that make the sums of dQ deterministic. Where L2
// does not hold the sums of dQ of a head, there is a launch for each of its query chunks (schedule/query_chunks.h).
//
//  Warpgroup 0         Producers: one thread fetches work tiles, and one issues the TMA copies (producer.cuh). Two more
//                      are reducers, which add partial dQ to the accumulators in memory (dq_reducers.cuh).
//  Warpgroups 1 and 2  Key warpgroups: S, P, dP and dS, and in registers dK and dV of 64 keys each (key_warpgroup.cuh).
//  Warpgroup 3         dQ warpgroup: the partial dQ of each iteration from dS, which the key warpgroups store in shared
//                      memory, and the draws of dropout (dq_warpgroup.cuh).
//
// A partial dQ goes through shared memory to a reducer (dq_epilogue.cuh). The reducer waits until the semaphore of the
// query tile has reached the CTA's rank. It then stores the partial dQ if its rank is 0, else adds it by TMA
// (cp.reduce.async.bulk), and raises the semaphore. The last contributor needs no reducer: its dQ warpgroup adds the
// accumulator to the partial dQ in registers, and writes dQ. Where dQ is pre-signalled
// (KeyStationaryConfig::pre_signals_dq), the reducer gets the accumulator and the rank before the GEMM of dQ is
// complete. It then waits for the semaphore while dQ is computed. The order of additions is the same.
//
// Shared memory: pipelines of K, of V, of Q and dO, of dS, and of partial dQ on its way to memory
// (KeyStationaryShared).
#pragma once

#include "kernels/sm90/backward/key_stationary/dq_reducers.cuh"
#include "kernels/sm90/backward/key_stationary/dq_warpgroup.cuh"
#include "kernels/sm90/backward/key_stationary/key_warpgroup.cuh"
#include "kernels/sm90/backward/key_stationary/producer.cuh"
#include "kernels/sm90/kernel.cuh"

namespace flash_attn_ext::sm90 {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    key_stationary_kernel(const __grid_constant__ typename Traits::Arguments args) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<KeyStationaryShared<Traits>*>(shared_memory);
  const int warpgroup = warpgroup_index();
  init_barriers(shared);
  __syncthreads();
  ptx::allow_dependent_launch();  // the CTAs of the next kernel find no registers before these end
  ptx::wait_for_kernel_before();
  if (warpgroup == 0) {
    ptx::release_registers<Traits::kConfig.tile.producer_registers>();
    const int warp = uniform(tile::warp());
    if (!ptx::elect()) return;
    if (warp == 0) KeyStationaryProducer<Traits>{args, shared}.run();
    if (warp == 1) KeyStationaryScheduler<Traits>{args, shared}.run();
    if (warp >= 2) DqReducer<Traits>{args, shared, warp - 2}.run();
  } else if (warpgroup <= Traits::kWarpgroups) {
    ptx::acquire_registers<Traits::kConfig.tile.key_registers>();
    KeyWarpgroup<Traits>{args, shared, warpgroup - 1}.run();
  } else {
    ptx::release_registers<Traits::kConfig.tile.dq_registers>();
    DqWarpgroup<Traits>{args, shared}.run();
  }
}

}  // namespace flash_attn_ext::sm90
