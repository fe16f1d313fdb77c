// Which lines L2 gives up first when it has to make room.
#pragma once

#include <cstdint>

namespace flash_attn_ext::ptx {

// Named by an access (.L2::cache_hint).
struct CachePolicy {
  uint64_t bits;
};

// PTX ISA, createpolicy: for what nobody reads again.
__device__ __forceinline__ CachePolicy evict_first() {
  CachePolicy policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy.bits));
  return policy;
}

}  // namespace flash_attn_ext::ptx
