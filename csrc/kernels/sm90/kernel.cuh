// What the Hopper kernels have in common. A kernel with warp roles begins in about this order:
//
//   init_barriers()            One thread initialises the barriers. In forward kernels prefetch_descriptors() runs
//                              beside it.
//   __syncthreads()            All threads see the barriers.
//   wait_for_kernel_before()   Programmatic dependent launch: what comes before overlaps the preceding kernel.
//   release_registers()        The producer's warpgroup releases registers, and consumers call acquire_registers().
//
// Each warp then runs its role until there are no more work tiles.
#pragma once

#include <initializer_list>

#include "kernels/sm90/tensor_map.h"
#include "ptx/dependent_launch.h"
#include "ptx/tensor_copy.h"
#include "ptx/warp_roles.h"
#include "tile/sm90/gemm.h"
#include "tile/sm90/pipeline.h"

namespace flash_attn_ext::sm90 {

// What a launch has to know about a kernel with warp roles.
template <template <class> class SharedOf, class Traits>
struct KernelShape {
  using Shared = SharedOf<Traits>;
  static constexpr int kThreads = Traits::kThreads;
};

// Broadcasts a warp-uniform value, so that ptxas knows that it is uniform. Loops over it keep pipeline stages, and with
// them the wgmma descriptors, in uniform registers.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xFFFFFFFFu, x, 0); }

// The index of the thread's warpgroup.
__device__ __forceinline__ int warpgroup_index() {
  return uniform(static_cast<int>(threadIdx.x) / tile::kWarpgroupSize);
}

template <class Shared, class... Arguments>
__device__ __forceinline__ void init_barriers(Shared& shared, const Arguments&... arguments) {
  if (threadIdx.x == 0) shared.init(arguments...);
}

// The registers of a thread of each role.
struct RoleRegisters {
  int producer;
  int consumer;
};

// A kernel whose warpgroup 0 is the producer, and whose other warpgroups are consumers. One thread runs the producer.
// Roles are passed by their types: with lambdas instead, the instructions would be others.
template <class Producer, class Consumer, RoleRegisters kRegisters>
__device__ __forceinline__ void run_roles(const auto& args, auto& shared) {
  const int warpgroup = warpgroup_index();
  init_barriers(shared);
  __syncthreads();
  ptx::wait_for_kernel_before();
  if (warpgroup == 0) {
    ptx::release_registers<kRegisters.producer>();
    if (uniform(tile::warp()) == 0 && ptx::elect()) Producer{args, shared}.run();
  } else {
    ptx::acquire_registers<kRegisters.consumer>();
    Consumer{args, shared, warpgroup - 1}.run();
  }
}

// Called beside init_barriers, by another warp that has nothing to do then.
__device__ __forceinline__ void prefetch_descriptors(std::initializer_list<const TmaDescriptor*> operands) {
  if (threadIdx.x != 2 * tile::kWarpSize) return;
  for (const TmaDescriptor* operand : operands) ptx::prefetch_map(operand->map);
}

// Signals a barrier once for the warp. All its threads call it that have read or written the stage of the barrier.
__device__ __forceinline__ void consumer_release(ptx::Barrier& barrier) {
  __syncwarp();
  if (tile::lane() == 0) ptx::arrive(barrier);
}

}  // namespace flash_attn_ext::sm90
