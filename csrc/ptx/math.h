// Special functions and conversions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flash_attn_ext::ptx {

// PTX ISA 9.7.3.21 ex2.approx.ftz: 2^x, relative error 2^-22; ex2(-inf) = 0.
__device__ __forceinline__ float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// PTX ISA 9.7.9.22 cvt.rn: two floats to two neighbouring elements, `low` in the lower half.
__device__ __forceinline__ uint32_t pack(float low, float high, __nv_bfloat16) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ uint32_t pack(float low, float high, __half) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// The value of 16 bits of memory.
__device__ __forceinline__ float to_float(uint16_t bits, __nv_bfloat16) {
  return __uint_as_float(uint32_t{bits} << 16);
}
__device__ __forceinline__ float to_float(uint16_t bits, __half) { return __half2float(__ushort_as_half(bits)); }

}  // namespace flash_attn_ext::ptx
