// Writes an accumulator through a shared tile (compute capability 9.0 and later), by few instructions: code that runs once
// for a tile waits for each of them to be fetched.
#pragma once

#include "kernels/epilogue/store_rows.cuh"
#include "ptx/stmatrix.h"
#include "tile/sm90/box_tile.h"

namespace flash_attn_ext {

// A warp's 16 rows [first_row, ...) of a tile that nobody else uses any more.
template <class Tile>
struct BoxRows {
  using Element = typename Tile::Element;
  static constexpr int kRows = 16;
  static constexpr int kPieces = 8;  // of 16 bytes, in the 128 of a chunk's row

  const uint32_t first;

  __device__ __forceinline__ BoxRows(Tile& tile, int first_row) : first(ptx::shared_address(&tile) + first_row * 128) {}

  // Writes the accumulator here. Returns whether one of the thread's elements in the first `rows` rows is not finite.
  template <class Acc>
  __device__ __forceinline__ bool fill(const Acc& acc, int rows) const {
    static_assert(Acc::kThreadRows == 2 && 8 * Acc::kColumnTiles <= Tile::kColumns);
    const uint32_t lane = tile::lane();
    const uint32_t own = first + lane % 16 * 128;
    const uint32_t own_piece = lane / 16 ^ lane % 8;
    float zeros[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < Acc::kColumnTiles; j += 2) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = i % 2;
        const float low = acc.at(r, j + i / 2, 0);
        const float high = acc.at(r, j + i / 2, 1);
        zeros[r] = fmaf(low, 0.0f, fmaf(high, 0.0f, zeros[r]));
        words[i] = ptx::pack(low, high, Element{});
      }
      ptx::store_matrix_x4(own + j / kPieces * Tile::kChunkBytes + (own_piece ^ j % kPieces) * 16, words);
    }
    __syncwarp();
    return (Acc::row(0) < rows && zeros[0] != 0.0f) || (Acc::row(1) < rows && zeros[1] != 0.0f);
  }

  // 128 neighbouring bytes of a row at a time, where the target is in chunks.
  __device__ __forceinline__ void copy_chunks(const OutputRows<Element>& target) const {
    constexpr int kRowsAtOnce = tile::kWarpSize / kPieces;
    const uint32_t piece = tile::lane() % kPieces;
    const int columns = target.columns - static_cast<int>(piece) * 8;
    int row = tile::lane() / kPieces;
    Element* to = target.data + row * target.row_stride + piece * 8;
#pragma unroll 1
    for (; row < min(target.rows, kRows); row += kRowsAtOnce, to += kRowsAtOnce * target.row_stride) {
      const uint32_t from = first + row * 128 + (piece ^ row % 8u) * 16;
#pragma unroll
      for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
        const uint4 words = ptx::load_shared_16(from + chunk * Tile::kChunkBytes);
        if (chunk * tile::kBoxColumns < columns) *reinterpret_cast<uint4*>(to + chunk * tile::kBoxColumns) = words;
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void copy_elements(const OutputRows<Element>& target) const {
    target.for_each_element([&](Element& to, int row, int column) {
      const uint32_t chunk = first + column / tile::kBoxColumns * Tile::kChunkBytes;
      const uint32_t piece = column % tile::kBoxColumns / 8 ^ row % 8;
      const uint32_t from = chunk + row * 128 + piece * 16 + column % 8 * sizeof(Element);
      reinterpret_cast<uint16_t&>(to) = static_cast<uint16_t>(ptx::load_shared_u16(from));
    });
  }
};

// For targets that are known to be in chunks. Returns whether one of the thread's elements in an existing row is not
// finite.
template <class Element, class Acc, class Tile>
__device__ __forceinline__ bool store_box_chunks(const OutputRows<Element>& target, const Acc& acc, Tile& staging,
                                                 int first_row) {
  const BoxRows<Tile> rows(staging, first_row);
  const bool any = rows.fill(acc, target.rows);
  rows.copy_chunks(target);
  return any;
}

// For any target.
template <class Element, class Acc, class Tile>
__device__ __forceinline__ bool store_boxes(const OutputRows<Element>& target, const Acc& acc, Tile& staging,
                                            int first_row) {
  const BoxRows<Tile> rows(staging, first_row);
  const bool any = rows.fill(acc, target.rows);
  if (target.in_chunks()) {
    rows.copy_chunks(target);
  } else {
    rows.copy_elements(target);
  }
  return any;
}

}  // namespace flash_attn_ext
