// A number for each column of a warpgroup's product, in float32, that a further step of the product adds to all rows.
//
// Lanes that hold the same columns of different rows would otherwise each load the numbers: 8 times as many bytes from
// shared memory as there are. A number x is 2^12 h + m + 2^-11 l, each part rounded to the element type: of x is lost
// no more than 2^-24 of it, or 2^-36. Where x or h is not finite, it adds NaN.
#pragma once

#include <cmath>
#include <cstdint>

#include "ptx/math.h"
#include "ptx/pin.h"
#include "ptx/shared_memory.h"
#include "ptx/wgmma.h"
#include "tile/accumulator.h"

namespace flash_attn_ext::tile {

inline constexpr float kHighFactor = 1 << 12;
// As small as keeps l finite where h is.
inline constexpr float kLowFactor = 1.0f / (1 << 11);

// The right operand, without a swizzle: a row of 16 bytes for each column, of which the first three elements are parts
// and the others 0.
template <class ElementType, int kColumns>
struct alignas(128) ColumnTerms {
  using Element = ElementType;

  uint4 rows[kColumns];

  // Both differences are exact.
  __device__ __forceinline__ static uint4 row(float x) {
    const auto h = static_cast<float>(Element(x / kHighFactor));
    const float rest = x - h * kHighFactor;
    const auto m = static_cast<float>(Element(rest));
    return {ptx::pack(h, m, Element{}), ptx::pack((rest - m) / kLowFactor, 0.0f, Element{}), 0, 0};
  }
  // Of -infinity.
  __device__ __forceinline__ static uint4 hidden_row() { return {ptx::pack(-INFINITY, 0.0f, Element{}), 0, 0, 0}; }
};

// The left operand, the same for all rows: what the parts are multiplied by. The 16 inner elements of the step are
// those 8 of `rows` twice, each time with half the factor: a 0 of this side never meets an infinite number.
template <class Element>
struct TermFactors {
  uint32_t a[4];

  __device__ __forceinline__ void init() {
    const int first = lane() % 4;  // of two neighbouring inner elements
    const uint32_t pair = first == 0   ? ptx::pack(kHighFactor / 2, 0.5f, Element{})
                          : first == 1 ? ptx::pack(kLowFactor / 2, 0.0f, Element{})
                                       : 0u;
    for (uint32_t& factors : a) factors = ptx::pin(static_cast<int>(pair));
  }
};

// What a product adds (gemm.h).
template <class Terms>
struct AddedTerms {
  using Element = typename Terms::Element;

  const TermFactors<Element>& factors;
  uint32_t first;  // of a matrix descriptor: in units of 16 bytes, 14 bits

  // The terms `count` places further in an array.
  __device__ __forceinline__ AddedTerms(const TermFactors<Element>& factors, const Terms& terms, int count)
      : factors(factors),
        first((ptx::shared_address(&terms) / 16 & 0x3FFFu) + count * static_cast<uint32_t>(sizeof(Terms) / 16)) {}

  // Both halves of the inner elements lie at the same place (a leading offset of 0), groups of 8 rows 128 bytes apart.
  template <class Sums>
  __device__ __forceinline__ void add_to(Sums& sums) const {
    ptx::multiply_rows_async(sums.c[0], factors.a, first | uint64_t{128 / 16} << 32, true, Element{});
  }
};

struct NoTerms {
  template <class Sums>
  __device__ __forceinline__ void add_to(Sums&) const {}
};

}  // namespace flash_attn_ext::tile
