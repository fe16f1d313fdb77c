// exp and tanh without branches or library calls, so that loops over them vectorise.
#pragma once

#include <cstdint>

#include "kernels/cpu/rows/simd.h"

namespace flash_attn_ext::cpu {

template <class Real>
struct ExpConstants;

template <>
struct ExpConstants<float> {
  using Bits = int32_t;
  static constexpr int kMantissaBits = 23;
  static constexpr float kRoundToInteger = 12582912.0f;  // 1.5 * 2^23: adding it leaves an integer in the low bits
  static constexpr float kLn2High = 0.693359375f;        // 9 significant bits: n * kLn2High is exact
  static constexpr float kLn2Low = -2.12194440e-4f;
  static constexpr float kSmallest = -87.0f;  // exp of less is subnormal, and taken as 0
  static constexpr float kLargest = 88.0f;
  static constexpr int kTaylorTerms = 7;  // 0.35^8 / 8! = 5e-9
};

template <>
struct ExpConstants<double> {
  using Bits = int64_t;
  static constexpr int kMantissaBits = 52;
  static constexpr double kRoundToInteger = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kLn2High = 0.6931471803691238;         // 32 significant bits
  static constexpr double kLn2Low = 1.9082149292705877e-10;
  static constexpr double kSmallest = -708.0;
  static constexpr double kLargest = 709.0;
  static constexpr int kTaylorTerms = 13;  // 0.35^14 / 14! = 5e-18
};

// x = n ln 2 + r with |r| <= ln 2 / 2. Returns 2^n, and e^r - 1 (without cancellation) through expm1_r.
template <class Real>
FLASH_SIMD_INLINE Real split_exponential(Real x, Real& expm1_r) {
  using C = ExpConstants<Real>;
  x = x < C::kSmallest ? C::kSmallest : x;
  x = x > C::kLargest ? C::kLargest : x;  // NaN passes both
  const Real shifted = x * Real(1.4426950408889634) + C::kRoundToInteger;
  const Real n = shifted - C::kRoundToInteger;
  const Real r = (x - n * C::kLn2High) - n * C::kLn2Low;
  // Taylor series by Horner's rule: r (1 + r/2 (1 + r/3 (1 + ...))). A loop left inside would stop vectorisation.
  Real series = Real(1);
#pragma GCC unroll 16
  for (int term = C::kTaylorTerms; term >= 2; --term) series = Real(1) + r * (Real(1) / Real(term)) * series;
  expm1_r = r * series;
  using Bits = typename C::Bits;
  // The builtin, since a call to std::bit_cast is inlined too late to be compiled for a clone's instruction set.
  const Bits one = __builtin_bit_cast(Bits, Real(1));
  return __builtin_bit_cast(Real, one + (__builtin_bit_cast(Bits, shifted) << C::kMantissaBits));
}

template <class Real>
FLASH_SIMD_INLINE Real vector_exp(Real x) {
  Real expm1_r;
  const Real power = split_exponential(x, expm1_r);
  return x < ExpConstants<Real>::kSmallest ? Real(0) : power + power * expm1_r;
}

// What ScoreTransform needs from a backend.
struct VectorMath {
  // tanh |x| = e / (e + 2) with e = exp(2|x|) - 1, which keeps full relative precision near 0.
  template <class Real>
  static FLASH_SIMD_INLINE Real tanh(Real x) {
    const Real magnitude = x < Real(0) ? -x : x;
    const Real doubled = magnitude > Real(20) ? Real(40) : Real(2) * magnitude;  // tanh 20 rounds to 1
    Real expm1_r;
    const Real power = split_exponential(doubled, expm1_r);
    const Real e = (power - Real(1)) + power * expm1_r;
    const Real result = e / (e + Real(2));
    return x < Real(0) ? -result : result;
  }
};

}  // namespace flash_attn_ext::cpu
