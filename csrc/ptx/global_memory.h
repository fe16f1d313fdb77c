// Access to global memory.
#pragma once

namespace flash_attn_ext::ptx {

// PTX ISA 9.7.9.11 st.global.v4: 16 bytes, to an address that is a multiple of 16.
__device__ __forceinline__ void store_global_16(void* target, const uint4& value) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(target)), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

// The same for data that is not read again soon: st.cs, so that L2 evicts it first.
__device__ __forceinline__ void stream_global_16(void* target, const uint4& value) {
  asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(target)), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

// PTX ISA, ld.acquire and red.release: stores before the release are visible, in all CTAs, after an acquire that reads
// the released value or a later one of its release sequence.
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

// PTX ISA, ld.global.cg with a predicate: 16 bytes from L2 if they are `there`, else zeros. Behind a branch, ptxas
// would serialise the wgmma that accumulates into these registers (C7515).
__device__ __forceinline__ float4 load_or_zeros(const float4* from, bool there) {
  float4 value = {0.0f, 0.0f, 0.0f, 0.0f};
  asm volatile(
      "{\n"
      ".reg .pred there;\n"
      "setp.ne.b32 there, %5, 0;\n"
      "@there ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "+f"(value.x), "+f"(value.y), "+f"(value.z), "+f"(value.w)
      : "l"(from), "r"(static_cast<int>(there)));
  return value;
}

}  // namespace flash_attn_ext::ptx
