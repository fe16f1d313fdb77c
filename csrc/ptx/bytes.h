// Bytes of a register.
#pragma once

#include <cstdint>

namespace flash_attn_ext::ptx {

// PTX ISA 9.7.9.7 prmt: byte i of the result has eight times the highest bit of the byte of x that digit i of `bytes`,
// hexadecimal and from the right, names.
__device__ __forceinline__ uint32_t signs_of_bytes(uint32_t x, uint32_t bytes) {
  uint32_t signs;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(signs) : "r"(x), "r"(bytes | 0x8888u));
  return signs;
}

}  // namespace flash_attn_ext::ptx
