// How many registers a warpgroup's threads have.
#pragma once

namespace flash_attn_ext::ptx {

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
