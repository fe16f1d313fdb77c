// Copies of boxes of a tensor to shared memory by the copy engine (TMA).
#pragma once

#include <cuda.h>

#include "ptx/barrier.h"
#include "ptx/cache_policy.h"

namespace flash_attn_ext::ptx {

// PTX ISA, prefetch.tensormap: the map will be used soon.
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Where a box begins in a tensor of four dimensions, the contiguous one first.
struct BoxOrigin {
  int column;
  int row;
  int head;
  int batch;
};

// PTX ISA, cp.async.bulk.tensor: the box that the map describes, zeros where the tensor has nothing. All of
// its bytes count towards the barrier's phase.
__device__ __forceinline__ void copy_box(void* target, const CUtensorMap& map, Barrier& barrier, const BoxOrigin& at) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared_address(target)),
      "l"(&map), "r"(shared_address(&barrier)), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch)
      : "memory");
}

// The same, with what L2 is to do with the lines that it brings.
__device__ __forceinline__ void copy_box(void* target, const CUtensorMap& map, Barrier& barrier, const BoxOrigin& at,
                                         CachePolicy policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(target)),
      "l"(&map), "r"(shared_address(&barrier)), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch),
      "l"(policy.bits)
      : "memory");
}

// PTX ISA, cp.async.bulk.tensor: a box from shared memory to what the tensor has of it, in the group of this thread's
// stores that commit_stores() ends (bulk_copy.h waits for groups).
__device__ __forceinline__ void store_box(const CUtensorMap& map, uint32_t source, const BoxOrigin& at) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(source), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch)
               : "memory");
}

// The same, with what L2 is to do with the lines.
__device__ __forceinline__ void store_box(const CUtensorMap& map, uint32_t source, const BoxOrigin& at,
                                          CachePolicy policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%2, %3, %4, %5}], [%1], "
      "%6;" ::"l"(&map),
      "r"(source), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch), "l"(policy.bits)
      : "memory");
}
__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

}  // namespace flash_attn_ext::ptx
