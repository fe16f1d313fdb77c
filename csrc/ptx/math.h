// Special functions and conversions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

namespace flash_attn_ext::ptx {

// PTX ISA 9.7.3.21 ex2.approx.ftz: 2^x, relative error 2^-22; ex2(-inf) = 0.
__device__ __forceinline__ float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// PTX ISA 9.7.3.16 rcp.approx.ftz: 1 / x, at most one unit in the last place off.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The natural logarithm of a normal number, infinity or NaN. PTX ISA 9.7.3.20 lg2.approx.ftz is within 2^-22 of log2
// between 1 and 2; the exponent is added separately.
__device__ __forceinline__ float log(float x) {
  constexpr float kLn2 = 0.69314718056f;
  const uint32_t bits = __float_as_uint(x);
  const auto exponent = static_cast<float>(static_cast<int>(bits >> 23) - 127);
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(__uint_as_float((bits & 0x007FFFFFu) | 0x3F800000u)));
  return x < INFINITY ? fmaf(exponent, kLn2, y * kLn2) : x;
}

// The largest of three numbers from 0 on, which are in the order of their bits. Hopper has one instruction for three
// integers, but not for three floats.
__device__ __forceinline__ float max_of_positive(float a, float b, float c) {
  return __int_as_float(__vimax3_s32(__float_as_int(a), __float_as_int(b), __float_as_int(c)));
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

// The same, but not reordered with other asm volatile: otherwise ptxas would place it between wgmma.
__device__ __forceinline__ uint32_t pack_in_order(float low, float high, __nv_bfloat16) {
  uint32_t packed;
  asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ uint32_t pack_in_order(float low, float high, __half) {
  uint32_t packed;
  asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// PTX ISA, fma.rn of pairs: a b + c of both elements.
__device__ __forceinline__ uint32_t multiply_add_pairs(uint32_t a, uint32_t b, uint32_t c, __nv_bfloat16) {
  uint32_t sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}
__device__ __forceinline__ uint32_t multiply_add_pairs(uint32_t a, uint32_t b, uint32_t c, __half) {
  uint32_t sum;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}

// The two elements of a pack.
__device__ __forceinline__ float2 unpack(uint32_t packed, __nv_bfloat16) {
  return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xFFFF0000u)};
}
__device__ __forceinline__ float2 unpack(uint32_t packed, __half) {
  return __half22float2(reinterpret_cast<const __half2&>(packed));
}

// The value of 16 bits of memory.
__device__ __forceinline__ float to_float(uint16_t bits, __nv_bfloat16) {
  return __uint_as_float(uint32_t{bits} << 16);
}
__device__ __forceinline__ float to_float(uint16_t bits, __half) { return __half2float(__ushort_as_half(bits)); }

// PTX ISA 9.7.9.7 prmt: digit i of `bytes` (hexadecimal, from the right) names a byte of x. Byte i of the result
// repeats the highest bit of that byte eight times.
__device__ __forceinline__ uint32_t signs_of_bytes(uint32_t x, uint32_t bytes) {
  uint32_t signs;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(signs) : "r"(x), "r"(bytes | 0x8888u));
  return signs;
}

}  // namespace flash_attn_ext::ptx
