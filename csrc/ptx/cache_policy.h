// Eviction priorities of lines in L2.
#pragma once

#include <cstdint>

namespace flash_attn_ext::ptx {

// The operand of .L2::cache_hint.
struct CachePolicy {
  uint64_t bits;
};

// PTX ISA, createpolicy: for data that is not read again.
__device__ __forceinline__ CachePolicy evict_first() {
  CachePolicy policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy.bits));
  return policy;
}

}  // namespace flash_attn_ext::ptx
