// Bytes of a register.
#pragma once

#include <cstdint>

namespace flash_attn_ext::ptx {

// PTX ISA 9.7.9.7 prmt: digit i of `bytes` (hexadecimal, from the right) names a byte of x. Byte i of the result
// repeats the highest bit of that byte eight times.
__device__ __forceinline__ uint32_t signs_of_bytes(uint32_t x, uint32_t bytes) {
  uint32_t signs;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(signs) : "r"(x), "r"(bytes | 0x8888u));
  return signs;
}

}  // namespace flash_attn_ext::ptx
