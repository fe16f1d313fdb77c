// Writes one row of an accumulator to a row of a tensor.
#pragma once

#include <cstdint>

#include "tile/element.h"

namespace flash_attn_ext {

// The tensor's row: `columns` elements, `stride` apart.
template <class Element>
struct OutputRow {
  Element* data;
  int columns;
  int64_t stride;
};

// Stores the thread's elements of its row r, times factor.
template <class Element, class Acc>
__device__ __forceinline__ void store_row(const OutputRow<Element>& row, const Acc& acc, int r, float factor) {
  // Stores two neighbouring elements at once where the row allows it.
  const bool pairs =
      row.stride == 1 && row.columns % 2 == 0 && reinterpret_cast<uintptr_t>(row.data) % (2 * sizeof(Element)) == 0;
  Element* target = row.data + Acc::column(0, 0) * row.stride;
  if (pairs && row.columns >= 8 * Acc::kColumnTiles) {
#pragma unroll
    for (int j = 0; j < Acc::kColumnTiles; ++j) {
      tile::store_pair(target + 8 * j, acc.at(r, j, 0) * factor, acc.at(r, j, 1) * factor);
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < Acc::kColumnTiles; ++j) {
    const int column = Acc::column(j, 0);
    const float low = acc.at(r, j, 0) * factor;
    const float high = acc.at(r, j, 1) * factor;
    if (pairs) {
      if (column < row.columns) tile::store_pair(target + 8 * j, low, high);
    } else {
      if (column < row.columns) target[8 * j * row.stride] = Element(low);
      if (column + 1 < row.columns) target[(8 * j + 1) * row.stride] = Element(high);
    }
  }
}

}  // namespace flash_attn_ext
