// Bulk copies of contiguous bytes between global and shared memory by TMA. Addresses and sizes are multiples of 16.
#pragma once

#include "ptx/barrier.h"

namespace flash_attn_ext::ptx {

// PTX ISA, cp.async.bulk: copies to shared memory; the bytes count towards the barrier's phase.
__device__ __forceinline__ void copy_bytes(void* target, const void* source, int bytes, Barrier& barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(target)),
               "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(shared_address(&barrier))
               : "memory");
}

// PTX ISA, cp.async.bulk: copies from shared memory, in a group of its own.
__device__ __forceinline__ void store_bytes(void* target, const void* source, int bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;" ::"l"(__cvta_generic_to_global(target)),
      "r"(shared_address(source)), "r"(bytes)
      : "memory");
}

// PTX ISA, cp.reduce.async.bulk: the same, added to the floats that are there.
__device__ __forceinline__ void add_floats(float* target, const float* source, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;" ::"l"(__cvta_generic_to_global(target)),
      "r"(shared_address(source)), "r"(bytes)
      : "memory");
}

// PTX ISA, cp.async.bulk.wait_group: waits until this thread's bulk stores have read shared memory, or have written
// global memory so that this thread sees it.
__device__ __forceinline__ void wait_until_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void wait_until_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// PTX ISA, fence.proxy.async: orders this thread's accesses to global memory, and what it has acquired, before its TMA
// accesses that follow.
__device__ __forceinline__ void fence_global_copies() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// PTX ISA, cp.async.bulk.prefetch: prefetches bytes of global memory to L2. Address and size are multiples of 16.
__device__ __forceinline__ void prefetch_bytes(const void* source, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(source)), "r"(bytes));
}

}  // namespace flash_attn_ext::ptx
