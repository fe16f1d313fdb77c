// One step of a GEMM: 16 x 8 results over an inner length of kInner, in as many mma instructions as the element type
// takes.
#pragma once

#include <type_traits>

#include "ptx/mma.h"
#include "tile/element.h"

namespace flash_attn_ext::tile {

// Half of a TF32 operand's last place: adding it to the bits of a float32 rounds it.
inline constexpr uint32_t kHalfPlace = 0x1000u;

// Rounds to TF32 in the bits that the hardware reads; it ignores the others. The rounding is a multiplication, not an
// addition to the bits: adding half a place to 0x7FFFFFFF, the NaN that arithmetic produces, would carry into the sign
// and leave a zero. The factor adds half a place on average over mantissas.
__device__ __forceinline__ uint32_t round_to_tf32(uint32_t bits) {
  constexpr float kHalfPlaceOnAverage = 1.0f + 0.69f / 2048;
  return __float_as_uint(__uint_as_float(bits) * kHalfPlaceOnAverage);
}

// x = big + small, both as TF32 operands: 21 bits of the mantissa, or 22 where big is rounded, too. Left operands are
// used often, so rounding them pays. It makes the signs of their small parts random, and so those of the products that
// are left out.
struct SplitFloat {
  uint32_t big;
  uint32_t small;
};

__device__ __forceinline__ SplitFloat split(uint32_t bits, bool rounds_big) {
  const uint32_t big = (rounds_big ? round_to_tf32(bits) : bits) & 0xFFFFE000u;
  return {big, __float_as_uint(__uint_as_float(bits) - __uint_as_float(big)) + kHalfPlace};
}

// How a float32 product is added to the accumulator. A tensor core truncates sums instead of rounding them, and over a
// long sum that error accumulates (Ootomo & Yokota 2022, section 4).
enum class Sums {
  kCutOff,    // inside the tensor core
  kSeparate,  // the same, but small terms have sums of their own: a third of the additions to the large sum
  kRounded,   // outside the tensor core, one addition per step
};

// d += left . right for float32: the product of the big parts is added to `sum`, and those with one small part to
// `small_terms`, which may be the same. small . small is below the precision of float32 (section 3 there). Small terms
// come first. Where the code splits a value twice, the compiler does so once.
__device__ __forceinline__ void multiply_split(float (&sum)[4], float (&small_terms)[4], const uint32_t (&a)[4],
                                               uint32_t b0, uint32_t b1) {
  uint32_t big[4];
  uint32_t small[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const SplitFloat left = split(a[e], true);
    big[e] = left.big;
    small[e] = left.small;
  }
  const SplitFloat right0 = split(b0, false);
  const SplitFloat right1 = split(b1, false);
  ptx::multiply_accumulate_tf32(small_terms, small, right0.big, right1.big);
  ptx::multiply_accumulate_tf32(small_terms, big, right0.small, right1.small);
  ptx::multiply_accumulate_tf32(sum, big, right0.big, right1.big);
}

template <class Element, Sums kSums = Sums::kCutOff>
__device__ __forceinline__ void multiply_step(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (sizeof(Element) == 2) {
    ptx::multiply_accumulate(d, a, b0, b1, Element{});
  } else if constexpr (std::is_same_v<Element, Tf32>) {
    const uint32_t rounded[4] = {round_to_tf32(a[0]), round_to_tf32(a[1]), round_to_tf32(a[2]), round_to_tf32(a[3])};
    ptx::multiply_accumulate_tf32(d, rounded, round_to_tf32(b0), round_to_tf32(b1));
  } else if constexpr (kSums == Sums::kRounded) {
    float sum[4] = {};
    multiply_split(sum, sum, a, b0, b1);
#pragma unroll
    for (int e = 0; e < 4; ++e) d[e] += sum[e];
  } else {
    multiply_split(d, d, a, b0, b1);
  }
}

}  // namespace flash_attn_ext::tile
