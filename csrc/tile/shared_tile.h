// A tile of rows in shared memory, swizzled so that 16-byte columns of 8 neighbouring rows lie in different banks.
#pragma once

#include <cstdint>

#include "ptx/cp_async.h"
#include "ptx/shared_memory.h"

namespace flash_attn_ext::tile {

template <class ElementType, int kRowsValue, int kColumnsValue>
struct SharedTile {
  using Element = ElementType;
  static constexpr int kRows = kRowsValue;
  static constexpr int kColumns = kColumnsValue;
  static constexpr int kChunk = 16 / sizeof(Element);  // elements in 16 bytes
  static constexpr int kChunksPerRow = kColumns / kChunk;
  static constexpr int kRowBytes = kColumns * sizeof(Element);
  static_assert(kRowBytes % 64 == 0);

  Element data[kRows * kColumns];

  // The swizzle permutes the 16-byte chunks inside groups of 128 bytes by the row's last 3 bits. Rows that are an odd
  // multiple of 64 bytes long already alternate between the two halves of the banks: groups of 64 and 2 bits do.
  static constexpr int kGroup = (kRowBytes % 128 == 0 ? 128 : 64) / sizeof(Element);

  __device__ static int swizzled_chunk(int row, int chunk) {
    return kRowBytes % 128 == 0 ? chunk ^ (row & 7) : chunk ^ ((row >> 1) & 3);
  }
  // The address of an element `step` rows down is this one's, exclusive or that, plus step rows: where the lowest bits
  // of the row and of step have none in common.
  __device__ static constexpr int swizzle_step(int step) {
    return 16 * (kRowBytes % 128 == 0 ? step & 7 : step >> 1 & 3);
  }
  template <int kFew>
  __device__ const SharedTile<Element, kFew, kColumns>& first_rows() const {
    static_assert(kFew <= kRows);
    return reinterpret_cast<const SharedTile<Element, kFew, kColumns>&>(*this);
  }

  __device__ const Element& at(int row, int column) const {
    return data[row * kColumns + swizzled_chunk(row, column / kChunk) * kChunk + column % kChunk];
  }
  __device__ uint32_t address(int row, int column) const { return ptx::shared_address(&at(row, column)); }
};

// Where one lane's part of an operand lies for block (0, 0), and how to get from there to the other blocks with one
// exclusive or and a constant: recomputing the swizzle for each would cost instructions, keeping them all, registers.
template <class Tile>
struct LaneAddress {
  uint32_t first;

  __device__ LaneAddress(const Tile& tile, int row, int column) : first(tile.address(row, column)) {}

  // row: a multiple of 8; column: a multiple of 32 bytes.
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
// threads share the work, and each commits its own copies. A thread keeps its place in the swizzle: it steps from group
// to group and down the rows.
//
// Index is the type that a thread computes its place in. It changes which registers ptxas has left, and nothing else:
// an int is better in the forward kernels up to head dim 128, by up to 2 %, and keeps those of 128 from spilling.
template <int kThreads, class Index = unsigned, class Tile>
__device__ __forceinline__ void copy_rows_async(Tile& tile, const GlobalRows<typename Tile::Element>& rows,
                                                int num_rows) {
  using Element = typename Tile::Element;
  constexpr int kChunks = Tile::kGroup / Tile::kChunk;
  constexpr int kRowStep = kThreads / kChunks;
  static_assert(kRowStep % 8 == 0);
  const auto thread = static_cast<Index>(threadIdx.x);
  const int first_row = static_cast<int>(thread / kChunks);
  const int first_column = static_cast<int>(thread % kChunks * Tile::kChunk);
  if (Tile::kRows < kRowStep && first_row >= Tile::kRows) return;
  const Element* source = rows.data + first_row * rows.stride + first_column;
  uint32_t target = tile.address(first_row, first_column);
  if (num_rows >= Tile::kRows && rows.columns >= Tile::kColumns) {
#pragma unroll
    for (int row = 0; row < Tile::kRows; row += kRowStep) {
#pragma unroll
      for (int column = 0; column < Tile::kColumns; column += Tile::kGroup) {
        ptx::copy_async_16(target + (row * Tile::kColumns + column) * sizeof(Element), source + column, 16);
      }
      source += kRowStep * rows.stride;
    }
    return;
  }
#pragma unroll 1
  for (int row = first_row; row < Tile::kRows; row += kRowStep) {
#pragma unroll
    for (int column = 0; column < Tile::kColumns; column += Tile::kGroup) {
      const int valid = row < num_rows ? min(max(rows.columns - first_column - column, 0), Tile::kChunk) : 0;
      ptx::copy_async_16(target + column * sizeof(Element), source + column, valid * sizeof(Element));
    }
    source += kRowStep * rows.stride;
    target += kRowStep * Tile::kColumns * sizeof(Element);
  }
}

}  // namespace flash_attn_ext::tile
