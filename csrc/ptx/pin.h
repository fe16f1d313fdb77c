// Keeps values in registers that the compiler would recompute.
#pragma once

namespace flash_attn_ext::ptx {

// Keeps a value in a register. Otherwise the compiler recomputes what follows from a kernel's parameters in every
// iteration of a loop, however long that takes.
__device__ __forceinline__ int pin(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

}  // namespace flash_attn_ext::ptx
