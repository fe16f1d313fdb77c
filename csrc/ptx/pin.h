// Keeps values in registers that the compiler would recompute.
#pragma once

namespace flash_attn_ext::ptx {

// Keeps a value in a register: what the compiler can compute from a kernel's parameters it computes again in every
// iteration of a loop, however long that takes.
__device__ __forceinline__ int pin(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

}  // namespace flash_attn_ext::ptx
