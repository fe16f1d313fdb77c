// Writes a warp's rows of a result, or one row of them, and flags rows that have a NaN.
#pragma once

#include <cstdint>

#include "ptx/global_memory.h"
#include "tile/accumulator.h"
#include "tile/element.h"
#include "tile/shared_tile.h"

namespace flash_attn_ext {

// The target of a warp's accumulator: `rows` rows from `data` on, of `columns` elements each.
template <class Element>
struct OutputRows {
  Element* data;
  int64_t row_stride;
  int64_t column_stride;
  int rows;
  int columns;

  // Whether rows can be written 16 bytes at a time.
  __device__ __forceinline__ bool in_chunks() const {
    constexpr int kChunk = 16 / sizeof(Element);
    return column_stride == 1 && columns % kChunk == 0 && row_stride % kChunk == 0 &&
           reinterpret_cast<uintptr_t>(data) % 16 == 0;
  }
};

// Stores one element at a time, for any strides.
template <class Element, class Acc>
__device__ __forceinline__ void store_elements(const OutputRows<Element>& target, const Acc& acc) {
#pragma unroll
  for (int r = 0; r < Acc::kThreadRows; ++r) {
    if (Acc::row(r) >= target.rows) continue;
    Element* row = target.data + Acc::row(r) * target.row_stride;
#pragma unroll
    for (int j = 0; j < Acc::kColumnTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = Acc::column(j, e);
        if (column < target.columns) row[column * target.column_stride] = Element(acc.at(r, j, e));
      }
    }
  }
}

// Stages the rows in rows [first_row, ...) of a shared tile that no other warp uses any more, so that neighbouring
// lanes write neighbouring 16 bytes.
template <class Element, class Acc, class Tile>
__device__ __forceinline__ void store_rows(const OutputRows<Element>& target, const Acc& acc, Tile& staging,
                                           int first_row) {
  if (!target.in_chunks()) {
    store_elements(target, acc);
    return;
  }
  __syncwarp();  // no lane reads the rows any more
  const tile::LaneAddress<Tile> own(staging, first_row + Acc::row(0), Acc::column(0, 0));
#pragma unroll
  for (int r = 0; r < Acc::kThreadRows; ++r) {
#pragma unroll
    for (int j = 0; j < Acc::kColumnTiles; ++j) {
      tile::store_shared_pair<Element>(own.at(Acc::row_step(r), 8 * j), acc.at(r, j, 0), acc.at(r, j, 1));
    }
  }
  __syncwarp();
  // A thread keeps its place in the swizzle, and steps from one group of columns to the next and down the rows.
  constexpr int kChunks = Tile::kGroup / Tile::kChunk;
  constexpr int kRowStep = tile::kWarpSize / kChunks;
  const int row = tile::lane() / kChunks;
  const int column = tile::lane() % kChunks * Tile::kChunk;
  const uint32_t source = staging.address(first_row + row, column);
  Element* out = target.data + row * target.row_stride + column;
#pragma unroll
  for (int step = 0; step < 16 * Acc::kRowTiles; step += kRowStep) {
#pragma unroll
    for (int group = 0; group < 8 * Acc::kColumnTiles; group += Tile::kGroup) {
      if (row + step >= target.rows || column + group >= target.columns) continue;
      ptx::store_global_16(out + group, ptx::load_shared_16((source ^ Tile::swizzle_step(step)) +
                                                            (step * Tile::kColumns + group) * sizeof(Element)));
    }
    out += kRowStep * target.row_stride;
  }
}

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

// flags: one per warp of the launch.
template <int kWarps, class... Accs>
__device__ __forceinline__ void flag_nan(uint8_t* flags, const Accs&... results) {
  const bool found = __any_sync(0xFFFFFFFFu, (results.has_nan() || ...));
  if (tile::lane() == 0) flags[blockIdx.x * kWarps + tile::warp()] = found;
}

}  // namespace flash_attn_ext
