// Augmented columns: a float32 number for each column of a GEMM, which one more wgmma step adds to all rows. The
// backward pass adds the LSE and delta in this way, and the forward pass a key bias.
//
// Without it, each lane that holds a column would load its number, and shared memory would deliver every number 8
// times. A number x is split into 2^12 h + m + 2^-11 l, with each part rounded to the element type. The split loses at
// most 2^-24 of x, or 2^-36. Where x or h is not finite, it adds NaN.
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
// The smallest factor that keeps l finite where h is finite.
inline constexpr float kLowFactor = 1.0f / (1 << 11);

// The right operand, without a swizzle: a 16-byte row for each column. Its first three elements are the parts, and the
// others are 0.
template <class ElementType, int kColumns>
struct alignas(128) AugmentedColumns {
  using Element = ElementType;

  uint4 rows[kColumns];

  // Both differences are exact in float32.
  __device__ __forceinline__ static uint4 row(float x) {
    const auto h = static_cast<float>(Element(x / kHighFactor));
    const float rest = x - h * kHighFactor;
    const auto m = static_cast<float>(Element(rest));
    return {ptx::pack(h, m, Element{}), ptx::pack((rest - m) / kLowFactor, 0.0f, Element{}), 0, 0};
  }
  // The row that adds -infinity.
  __device__ __forceinline__ static uint4 hidden_row() { return {ptx::pack(-INFINITY, 0.0f, Element{}), 0, 0, 0}; }
};

// The left operand, the same for all rows: the factors of the parts. The 16 inner elements of the step are the 8 of
// `rows` twice, each time with half the factor, so that a 0 on this side is never multiplied by an infinity.
template <class Element>
struct ColumnFactors {
  uint32_t a[4];

  __device__ __forceinline__ void init() {
    const int first = lane() % 4;  // the first of two neighbouring inner elements
    const uint32_t pair = first == 0   ? ptx::pack(kHighFactor / 2, 0.5f, Element{})
                          : first == 1 ? ptx::pack(kLowFactor / 2, 0.0f, Element{})
                                       : 0u;
    for (uint32_t& factors : a) factors = ptx::pin(static_cast<int>(pair));
  }
};

// The extra step that a GEMM of gemm.h takes.
template <class Columns>
struct AugmentedStep {
  using Element = typename Columns::Element;

  const ColumnFactors<Element>& factors;
  uint32_t first;  // the address in a matrix descriptor: 14 bits, in units of 16 bytes

  // The numbers `count` places further in an array.
  __device__ __forceinline__ AugmentedStep(const ColumnFactors<Element>& factors, const Columns& columns, int count)
      : factors(factors),
        first((ptx::shared_address(&columns) / 16 & 0x3FFFu) + count * static_cast<uint32_t>(sizeof(Columns) / 16)) {}

  // Both halves of the inner elements have the same address (a leading offset of 0); groups of 8 rows are 128 bytes
  // apart.
  template <int kColumnTiles>
  __device__ __forceinline__ void add_to(float (&sums)[kColumnTiles][4]) const {
    ptx::multiply_rows_async(sums, factors.a, first | uint64_t{128 / 16} << 32, true, Element{});
  }
};

// The left operand in shared memory, for kernels that have no registers for it: eight rows stand for all of them.
template <class Element>
struct alignas(128) SharedColumnFactors {
  uint4 rows[8];

  __device__ __forceinline__ void init(int row) {
    rows[row] = {ptx::pack(kHighFactor / 2, 0.5f, Element{}), ptx::pack(kLowFactor / 2, 0.0f, Element{}), 0, 0};
  }
};

// The extra step with it.
template <class Columns>
struct SharedAugmentedStep {
  using Element = typename Columns::Element;

  uint32_t factors;  // addresses as above
  uint32_t first;

  // The numbers `count` places further in an array, from a column on.
  __device__ __forceinline__ SharedAugmentedStep(const SharedColumnFactors<Element>& left, const Columns& columns,
                                                 int count, int column)
      : factors(ptx::shared_address(&left) / 16 & 0x3FFFu),
        first((ptx::shared_address(&columns) / 16 & 0x3FFFu) + count * static_cast<uint32_t>(sizeof(Columns) / 16) +
              column) {}

  // sums: of the columns from `column` on. Groups of 8 rows of the left operand have the same address.
  template <int kColumnTiles>
  __device__ __forceinline__ void add_to(float (&sums)[kColumnTiles][4], int column = 0) const {
    ptx::multiply_async(sums, uint64_t{factors}, (first + column) | uint64_t{128 / 16} << 32, true, Element{});
  }
};

struct NoAugmentedStep {
  template <int kColumnTiles>
  __device__ __forceinline__ void add_to(float (&)[kColumnTiles][4], int = 0) const {}
};

}  // namespace flash_attn_ext::tile
