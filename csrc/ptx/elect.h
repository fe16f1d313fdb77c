// One thread of a warp.
#pragma once

#include <cstdint>

namespace flash_attn_ext::ptx {

// PTX ISA, elect.sync: true for one thread of a warp that is here as a whole. ptxas knows that it is one; around each
// copy that a thread starts which was chosen by its number, it puts a loop over all threads that may be there.
__device__ __forceinline__ bool elect() {
  uint32_t chosen;
  asm volatile("{.reg .pred is;\nelect.sync _|is, 0xFFFFFFFF;\nselp.u32 %0, 1, 0, is; }" : "=r"(chosen));
  return chosen != 0;
}

}  // namespace flash_attn_ext::ptx
