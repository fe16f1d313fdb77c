// A tile of 16-bit rows in shared memory, swizzled so that 16-byte columns of 8 neighbouring rows lie in different
// banks.
#pragma once

#include <cstdint>

#include "ptx/cp_async.h"
#include "ptx/ldmatrix.h"

namespace flash_attn_ext::tile {

template <class ElementType, int kRowsValue, int kColumnsValue>
struct SharedTile {
  using Element = ElementType;
  static constexpr int kRows = kRowsValue;
  static constexpr int kColumns = kColumnsValue;
  static constexpr int kChunk = 16 / sizeof(Element);  // elements in 16 bytes
  static constexpr int kChunksPerRow = kColumns / kChunk;
  static_assert(sizeof(Element) == 2 && kColumns % 32 == 0);

  Element data[kRows * kColumns];

  // The swizzle permutes the 16-byte chunks inside groups of 64 columns by the row's last 3 bits. Rows that are an odd
  // multiple of 64 bytes long already alternate between the two halves of the banks: groups of 32 and 2 bits do.
  static constexpr int kGroup = kColumns % 64 == 0 ? 64 : 32;

  __device__ static int swizzled_chunk(int row, int chunk) {
    return kGroup == 64 ? chunk ^ (row & 7) : chunk ^ ((row >> 1) & 3);
  }
  __device__ uint32_t address(int row, int column) const {
    const int chunk = swizzled_chunk(row, column / kChunk);
    return ptx::shared_address(data + row * kColumns + chunk * kChunk);
  }
};

// Where one lane's row of an ldmatrix lies for block (0, 0), and how to get from there to the other blocks with one
// exclusive or and a constant: recomputing the swizzle for each would cost instructions, keeping them all, registers.
template <class Tile>
struct LaneAddress {
  uint32_t first;

  __device__ LaneAddress(const Tile& tile, int row, int column) : first(tile.address(row, column)) {}

  // row: a multiple of 8; column: a multiple of 16.
  __device__ __forceinline__ uint32_t at(int row, int column) const {
    constexpr int kBytes = sizeof(typename Tile::Element);
    return (first ^ (column % Tile::kGroup * kBytes)) +
           (row * Tile::kColumns + column / Tile::kGroup * Tile::kGroup) * kBytes;
  }
};

// Rows of a global tensor: consecutive rows `stride` elements apart, `columns` of them valid.
template <class Element>
struct GlobalRows {
  const Element* data;
  int64_t stride;
  int columns;
};

// Starts copying rows [0, num_rows) into the tile; rows and columns beyond what is valid become zeros. The block's
// threads share the work, and each commits its own copies.
template <int kThreads, class Tile>
__device__ __forceinline__ void copy_rows_async(Tile& tile, const GlobalRows<typename Tile::Element>& rows,
                                                int num_rows) {
  constexpr int kChunks = Tile::kRows * Tile::kChunksPerRow;
  if constexpr (kThreads % Tile::kChunksPerRow == 0 && kThreads / Tile::kChunksPerRow % 8 == 0) {
    // A thread keeps its column and its place in the swizzle, and steps down the rows.
    constexpr int kRowStep = kThreads / Tile::kChunksPerRow;
    const int first_row = static_cast<int>(threadIdx.x) / Tile::kChunksPerRow;
    const int column = static_cast<int>(threadIdx.x) % Tile::kChunksPerRow * Tile::kChunk;
    const int valid = min(max(rows.columns - column, 0), Tile::kChunk) * static_cast<int>(sizeof(*rows.data));
    const auto* source = rows.data + first_row * rows.stride + column;
    const uint32_t target = tile.address(first_row, column);
#pragma unroll
    for (int row = 0; row < Tile::kRows; row += kRowStep) {
      const bool exists = row + first_row < num_rows && valid > 0;
      ptx::copy_async_16(target + row * Tile::kColumns * sizeof(*rows.data), exists ? source : rows.data,
                         exists ? valid : 0);
      source += kRowStep * rows.stride;
    }
  } else {
#pragma unroll 4
    for (int index = static_cast<int>(threadIdx.x); index < kChunks; index += kThreads) {
      const int row = index / Tile::kChunksPerRow;
      const int column = index % Tile::kChunksPerRow * Tile::kChunk;
      const int valid = row < num_rows ? min(max(rows.columns - column, 0), Tile::kChunk) : 0;
      const auto* source = valid > 0 ? rows.data + row * rows.stride + column : rows.data;
      ptx::copy_async_16(tile.address(row, column), source, valid * sizeof(*rows.data));
    }
  }
}

}  // namespace flash_attn_ext::tile
