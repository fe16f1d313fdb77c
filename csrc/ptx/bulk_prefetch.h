// Bulk prefetch of contiguous bytes from global memory to L2, by TMA.
#pragma once

namespace flash_attn_ext::ptx {

// PTX ISA, cp.async.bulk.prefetch: address and size are multiples of 16.
__device__ __forceinline__ void prefetch_bytes(const void* source, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(source)), "r"(bytes));
}

}  // namespace flash_attn_ext::ptx
