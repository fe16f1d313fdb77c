// Addresses of shared memory, and loads from them.
#pragma once

#include <cstdint>

namespace flash_attn_ext::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// PTX ISA 9.7.9.8 ld.shared.
__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address));
  return value;
}

}  // namespace flash_attn_ext::ptx
