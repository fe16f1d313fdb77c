// TMA loads and stores of boxes of a tensor, and how long L2 keeps them.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ptx/barrier.h"

namespace flash_attn_ext::ptx {

// An eviction priority of lines in L2: the operand of .L2::cache_hint.
struct CachePolicy {
  uint64_t bits;
};

// PTX ISA, createpolicy: for data that is not read again.
__device__ __forceinline__ CachePolicy evict_first() {
  CachePolicy policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy.bits));
  return policy;
}

// PTX ISA, prefetch.tensormap: prefetches a TMA descriptor.
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// The coordinate of a TMA box in a tensor of four dimensions, the contiguous one first.
struct TmaCoordinate {
  int column;
  int row;
  int head;
  int batch;
};

// PTX ISA, cp.async.bulk.tensor: loads the box that the descriptor describes, zero-padded past the tensor's end. All of
// its bytes count towards the barrier's phase.
__device__ __forceinline__ void copy_box(void* target, const CUtensorMap& map, Barrier& barrier,
                                         const TmaCoordinate& at) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared_address(target)),
      "l"(&map), "r"(shared_address(&barrier)), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch)
      : "memory");
}

// The same, with an L2 cache policy.
__device__ __forceinline__ void copy_box(void* target, const CUtensorMap& map, Barrier& barrier,
                                         const TmaCoordinate& at, CachePolicy policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(target)),
      "l"(&map), "r"(shared_address(&barrier)), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch),
      "l"(policy.bits)
      : "memory");
}

// PTX ISA, cp.async.bulk.tensor: stores a box from shared memory, clipped to the tensor. It belongs to the group of
// this thread's stores that commit_stores() closes; bulk_copy.h waits for groups.
__device__ __forceinline__ void store_box(const CUtensorMap& map, uint32_t source, const TmaCoordinate& at) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(source), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch)
               : "memory");
}

// The same, with an L2 cache policy.
__device__ __forceinline__ void store_box(const CUtensorMap& map, uint32_t source, const TmaCoordinate& at,
                                          CachePolicy policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%2, %3, %4, %5}], [%1], "
      "%6;" ::"l"(&map),
      "r"(source), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch), "l"(policy.bits)
      : "memory");
}
__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

}  // namespace flash_attn_ext::ptx
