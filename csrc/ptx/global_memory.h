// Access to global memory.
#pragma once

namespace flash_attn_ext::ptx {

// PTX ISA 9.7.9.11 st.global.v4: 16 bytes, to an address that is a multiple of 16.
__device__ __forceinline__ void store_global_16(void* target, const uint4& value) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(target)), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

// The same where nobody reads it again soon: st.cs, so that L2 gives it up first.
__device__ __forceinline__ void stream_global_16(void* target, const uint4& value) {
  asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(target)), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

// PTX ISA, ld.acquire and red.release: what was stored before the release is visible after an acquire that sees it, or
// what others made of it, in all blocks.
__device__ __forceinline__ int load_acquire(const int* source) {
  int value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(source)) : "memory");
  return value;
}
// The target becomes `value` unless it is larger already.
__device__ __forceinline__ void raise_releasing(int* target, int value) {
  asm volatile("red.release.gpu.global.max.s32 [%0], %1;" ::"l"(__cvta_generic_to_global(target)), "r"(value)
               : "memory");
}

// PTX ISA, atom.acq_rel: adds, and returns what was there.
__device__ __forceinline__ int add_releasing_acquiring(int* target, int value) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(target)), "r"(value)
               : "memory");
  return before;
}

}  // namespace flash_attn_ext::ptx
