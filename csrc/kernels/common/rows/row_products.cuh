// The products that delta sums: rows of O times rows of dO, one chunk of each row at a time.
#pragma once

#include <cstdint>

#include "tile/element.h"

namespace flash_attn_ext::common {

// The elements of one load: at most 16 bytes.
template <class ElementType, int kCountValue = 16 / sizeof(ElementType)>
struct alignas(kCountValue * sizeof(ElementType)) Chunk {
  using Element = ElementType;
  static constexpr int kCount = kCountValue;

  Element elements[kCount];
};

// The same columns of rows of O and dO.
template <class Element>
struct PairedRows {
  const Element* out;  // of the first row
  const Element* dout;
  int64_t out_stride;
  int64_t dout_stride;
};

// sum + left . right.
template <class Chunk>
__device__ __forceinline__ auto add_product(tile::Accumulate<typename Chunk::Element> sum, const Chunk& left,
                                            const Chunk& right) {
#pragma unroll
  for (int e = 0; e < Chunk::kCount; ++e) {
    sum += static_cast<decltype(sum)>(left.elements[e]) * static_cast<decltype(sum)>(right.elements[e]);
  }
  return sum;
}

// sums[i] += the product of the chunks of row step(i), for rows below num_rows. All loads are in flight together.
template <class Chunk, int kRows, class StepOf>
__device__ __forceinline__ void add_products(tile::Accumulate<typename Chunk::Element> (&sums)[kRows],
                                             const PairedRows<typename Chunk::Element>& rows, int num_rows,
                                             StepOf&& step) {
  Chunk outs[kRows];
  Chunk douts[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (step(i) >= num_rows) continue;
    outs[i] = *reinterpret_cast<const Chunk*>(rows.out + step(i) * rows.out_stride);
    douts[i] = *reinterpret_cast<const Chunk*>(rows.dout + step(i) * rows.dout_stride);
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (step(i) < num_rows) sums[i] = add_product(sums[i], outs[i], douts[i]);
  }
}

}  // namespace flash_attn_ext::common
