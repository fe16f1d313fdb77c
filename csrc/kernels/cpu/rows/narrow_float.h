// The 16-bit types of elements, and their conversions to and from float: exact one way, to nearest with ties to even
// the other way. All are free of branches, so loops over them are vectorised.
#pragma once

#include <cstdint>

#include "kernels/cpu/rows/simd.h"

namespace flash_attn_ext::cpu {

FLASH_SIMD_INLINE float bfloat16_to_float(uint16_t bits) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16);
}

FLASH_SIMD_INLINE uint16_t bfloat16_from_float(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(value != value ? 0x7FC0u : rounded);
}

FLASH_SIMD_INLINE float float16_to_float(uint16_t bits) {
  constexpr uint32_t kExponentBias = (127u - 15u) << 23;
  const uint32_t magnitude = bits & 0x7FFFu;
  const uint32_t widened = magnitude << 13;
  // A subnormal is a whole number of 2^-24. Infinity and NaN keep the largest exponent.
  const uint32_t subnormal =
      __builtin_bit_cast(uint32_t, static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t special = widened + 2 * kExponentBias;
  const uint32_t normal = widened + kExponentBias;
  const uint32_t result = magnitude < 0x0400u ? subnormal : magnitude >= 0x7C00u ? special : normal;
  return __builtin_bit_cast(float, result | static_cast<uint32_t>(bits & 0x8000u) << 16);
}

FLASH_SIMD_INLINE uint16_t float16_from_float(float value) {
  constexpr uint32_t kExponentBias = (127u - 15u) << 23;
  constexpr uint32_t kLeastNormal = 0x38800000u;    // 2^-14
  constexpr uint32_t kLeastInfinite = 0x477FF000u;  // 65520, halfway between the largest number and the next
  constexpr uint32_t kInfinity = 0x7F800000u;
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  const uint32_t normal = (magnitude + 0xFFFu + ((magnitude >> 13) & 1u) - kExponentBias) >> 13;
  // Next to 0.5, neighbouring floats are 2^-24 apart, as subnormals of 16 bits are: the sum rounds to one of them.
  const float sum = __builtin_bit_cast(float, magnitude) + 0.5f;
  const uint32_t subnormal = __builtin_bit_cast(uint32_t, sum) - __builtin_bit_cast(uint32_t, 0.5f);
  const uint32_t finite = magnitude < kLeastNormal ? subnormal : normal;
  const uint32_t special = magnitude > kInfinity ? 0x7E00u : 0x7C00u;
  const uint32_t result = magnitude >= kLeastInfinite ? special : finite;
  return static_cast<uint16_t>(result | (bits >> 16 & 0x8000u));
}

struct BFloat16 {
  uint16_t bits;

  BFloat16() = default;
  explicit BFloat16(float value) : bits(bfloat16_from_float(value)) {}
  operator float() const { return bfloat16_to_float(bits); }
};

struct Float16 {
  uint16_t bits;

  Float16() = default;
  explicit Float16(float value) : bits(float16_from_float(value)) {}
  operator float() const { return float16_to_float(bits); }
};

}  // namespace flash_attn_ext::cpu
