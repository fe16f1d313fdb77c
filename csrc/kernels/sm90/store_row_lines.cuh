// Writes a warp's 16 rows of 16-bit elements through a tile in shared memory, by stores of the warp itself, to a target
// that consists of 16-byte chunks. The code is short, because code that runs once for a tile has to wait until it is
// fetched.
#pragma once

#include "kernels/epilogue/store_rows.cuh"
#include "ptx/global_memory.h"
#include "ptx/stmatrix.h"
#include "tile/sm90/smem_tile.h"

namespace flash_attn_ext::sm90 {

// It uses rows [first_row, ...) of a tile that is otherwise unused from then on, and writes 128 neighbouring bytes of a
// row at a time. store: writes 16 bytes. Returns whether one of the thread's elements in an existing row is not finite.
template <class Element, class Acc, class Tile>
__device__ __forceinline__ bool store_row_lines(const OutputRows<Element>& target, const Acc& acc, Tile& staging,
                                                int first_row, void (*store)(void*, const uint4&)) {
  static_assert(Acc::kThreadRows == 2 && 8 * Acc::kColumnTiles <= Tile::kColumns);
  constexpr int kSmemRowVectors = tile::kSmemRowBytes / 16;
  const uint32_t lane = tile::lane();
  const uint32_t rows = ptx::shared_address(&staging) + first_row * tile::kSmemRowBytes;
  const uint32_t own = rows + lane % 16 * tile::kSmemRowBytes;
  const uint32_t own_vector = lane / 16 ^ lane % 8;
  float zeros[2][2] = {};
#pragma unroll
  for (int j = 0; j < Acc::kColumnTiles; j += 2) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = i % 2;
      const float low = acc.at(r, j + i / 2, 0);
      const float high = acc.at(r, j + i / 2, 1);
      zeros[r][0] = fmaf(low, 0.0f, zeros[r][0]);
      zeros[r][1] = fmaf(high, 0.0f, zeros[r][1]);
      words[i] = ptx::pack(low, high, Element{});
    }
    ptx::store_matrix_x4(own + j / kSmemRowVectors * Tile::kChunkBytes + (own_vector ^ j % kSmemRowVectors) * 16,
                         words);
  }
  __syncwarp();
  constexpr int kRowsAtOnce = tile::kWarpSize / kSmemRowVectors;
  const uint32_t vector = lane % kSmemRowVectors;
  const int columns = target.columns - static_cast<int>(vector) * 8;
  int row = static_cast<int>(lane / kSmemRowVectors);
  Element* to = target.data + row * target.row_stride + vector * 8;
#pragma unroll 1
  for (; row < min(target.rows, 16); row += kRowsAtOnce, to += kRowsAtOnce * target.row_stride) {
    const uint32_t from = rows + row * tile::kSmemRowBytes + (vector ^ row % 8u) * 16;
#pragma unroll
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
      const uint4 words = ptx::load_shared_16(from + chunk * Tile::kChunkBytes);
      if (chunk * tile::kSmemChunkColumns < columns) store(to + chunk * tile::kSmemChunkColumns, words);
    }
  }
  __syncwarp();
  return (Acc::row(0) < target.rows && zeros[0][0] + zeros[0][1] != 0.0f) ||
         (Acc::row(1) < target.rows && zeros[1][0] + zeros[1][1] != 0.0f);
}

// Stores zeros, to any target.
template <class Element>
__device__ __forceinline__ void store_zeros(const OutputRows<Element>& target) {
#pragma unroll 1
  for (int row = 0; row < min(target.rows, 16); ++row) {
#pragma unroll 1
    for (int column = tile::lane(); column < target.columns; column += tile::kWarpSize) {
      target.data[row * target.row_stride + column * target.column_stride] = Element(0.0f);
    }
  }
  __syncwarp();
}

}  // namespace flash_attn_ext::sm90
