// One thread of a warp.
#pragma once

#include <cstdint>

namespace flash_attn_ext::ptx {

// PTX ISA, elect.sync: true for one thread of a warp that is here as a whole. ptxas then knows that one thread goes on.
// Of a thread that is chosen by its number it does not, and puts each copy into a loop over all active threads.
__device__ __forceinline__ bool elect() {
  uint32_t chosen;
  asm volatile("{.reg .pred is;\nelect.sync _|is, 0xFFFFFFFF;\nselp.u32 %0, 1, 0, is; }" : "=r"(chosen));
  return chosen != 0;
}

}  // namespace flash_attn_ext::ptx
