// How many registers a warpgroup's threads have.
#pragma once

namespace flash_attn_ext::ptx {

// PTX ISA, setmaxnreg: gives registers back to the block, or waits for them. By all warps of a warpgroup.
template <int kRegisters>
__device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void acquire_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace flash_attn_ext::ptx
