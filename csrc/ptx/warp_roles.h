// What gives warps their roles: one thread of a warp, and how many registers a warpgroup's threads have.
#pragma once

#include <cstdint>

namespace flash_attn_ext::ptx {

// PTX ISA, elect.sync: true for one thread of a converged warp. ptxas then knows that a single thread continues; for a
// thread that is selected by its index it does not, and wraps each TMA instruction into a loop over active threads.
__device__ __forceinline__ bool elect() {
  uint32_t chosen;
  asm volatile("{.reg .pred is;\nelect.sync _|is, 0xFFFFFFFF;\nselp.u32 %0, 1, 0, is; }" : "=r"(chosen));
  return chosen != 0;
}

// PTX ISA, setmaxnreg: releases registers to the CTA's pool, or acquires them from it. All warps of a warpgroup call
// it.
template <int kRegisters>
__device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void acquire_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace flash_attn_ext::ptx
