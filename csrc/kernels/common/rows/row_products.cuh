// The products that delta sums: rows of O times rows of dO, a piece of each row at a time.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "tile/element.h"

namespace flash_attn_ext::common {

// Elements that one load takes: at most 16 bytes.
template <class ElementType, int kCountValue = 16 / sizeof(ElementType)>
struct alignas(kCountValue * sizeof(ElementType)) Piece {
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
template <class Piece>
__device__ __forceinline__ auto add_product(tile::Accumulate<typename Piece::Element> sum, const Piece& left,
                                            const Piece& right) {
#pragma unroll
  for (int e = 0; e < Piece::kCount; ++e) {
    sum += static_cast<decltype(sum)>(left.elements[e]) * static_cast<decltype(sum)>(right.elements[e]);
  }
  return sum;
}

// sums[i] += the product of row step(i)'s pieces, as far as there are num_rows rows. All loads are in flight together.
template <class Piece, int kRows, class StepOf>
__device__ __forceinline__ void add_products(tile::Accumulate<typename Piece::Element> (&sums)[kRows],
                                             const PairedRows<typename Piece::Element>& rows, int num_rows,
                                             StepOf&& step) {
  Piece outs[kRows];
  Piece douts[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (step(i) >= num_rows) continue;
    outs[i] = *reinterpret_cast<const Piece*>(rows.out + step(i) * rows.out_stride);
    douts[i] = *reinterpret_cast<const Piece*>(rows.dout + step(i) * rows.dout_stride);
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (step(i) < num_rows) sums[i] = add_product(sums[i], outs[i], douts[i]);
  }
}

// O and dO of a head.
struct OutputHead {
  const attention::MatrixView& out;
  const attention::MatrixView& dout;
  int64_t batch;
  int64_t head;
  int64_t head_dim;
};

// Whether a head's rows can be read 16 bytes at a time.
template <class Element>
__device__ __forceinline__ bool in_chunks(const attention::MatrixView& view, const Element* head, int64_t head_dim) {
  return view.column_stride == 1 && (head_dim | view.row_stride) % Piece<Element>::kCount == 0 &&
         reinterpret_cast<uintptr_t>(head) % 16 == 0;
}

// sums[i] = dO . O of row first_row + i * row_step, as far as there are num_rows from first_row on, in all of the
// kLanes neighbouring lanes that share a row: 16 bytes each, added up in a fixed butterfly order.
template <class Element, int kLanes, int kRows>
__device__ __forceinline__ void sum_output_products(tile::Accumulate<Element> (&sums)[kRows], const OutputHead& of,
                                                    int64_t first_row, int num_rows, int row_step) {
  const auto* out = of.out.row<const Element>(of.batch, of.head, 0);
  const auto* dout = of.dout.row<const Element>(of.batch, of.head, 0);
  const auto add = [&]<class Piece>(Piece) {
    for (int64_t column = threadIdx.x % kLanes * Piece::kCount; column < of.head_dim;
         column += kLanes * Piece::kCount) {
      add_products<Piece>(sums,
                          {out + first_row * of.out.row_stride + column * of.out.column_stride,
                           dout + first_row * of.dout.row_stride + column * of.dout.column_stride, of.out.row_stride,
                           of.dout.row_stride},
                          num_rows, [&](int i) { return i * row_step; });
    }
  };
  if (in_chunks(of.out, out, of.head_dim) && in_chunks(of.dout, dout, of.head_dim)) {
    add(Piece<Element>());
  } else {
    add(Piece<Element, 1>());
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) sums[i] += __shfl_xor_sync(0xFFFFFFFFu, sums[i], offset);
  }
}

}  // namespace flash_attn_ext::common
