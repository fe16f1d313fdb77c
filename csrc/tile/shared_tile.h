// A tile of rows in shared memory, swizzled so that the same 16-byte column of 8 consecutive rows lies in different
// banks.
#pragma once

#include <cstdint>

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

  // The swizzle permutes the 16-byte chunks inside groups of 128 bytes by the last 3 bits of the row. Rows that are an
  // odd multiple of 64 bytes long already alternate between the two halves of the banks, so groups of 64 bytes and 2
  // bits suffice.
  static constexpr int kGroup = (kRowBytes % 128 == 0 ? 128 : 64) / sizeof(Element);

  __device__ static int swizzled_chunk(int row, int chunk) {
    return kRowBytes % 128 == 0 ? chunk ^ (row & 7) : chunk ^ ((row >> 1) & 3);
  }
  // The address of an element `step` rows further down is (address ^ swizzle_step(step)) + step rows, if the lowest
  // bits of the row and of step have none in common.
  __device__ static constexpr int swizzle_step(int step) {
    return 16 * (kRowBytes % 128 == 0 ? step & 7 : step >> 1 & 3);
  }
  // kFew rows from `first` on, a multiple of 8.
  template <int kFew>
  __device__ const SharedTile<Element, kFew, kColumns>& rows_from(int first) const {
    static_assert(kFew <= kRows);
    return reinterpret_cast<const SharedTile<Element, kFew, kColumns>&>(data[first * kColumns]);
  }

  __device__ const Element& at(int row, int column) const {
    return data[row * kColumns + swizzled_chunk(row, column / kChunk) * kChunk + column % kChunk];
  }
  __device__ uint32_t address(int row, int column) const { return ptx::shared_address(&at(row, column)); }
};

// The address of a lane's part of an operand for block (0, 0). An exclusive or and a constant lead from there to every
// other block: computing the swizzle for each block would take instructions, and caching all addresses would take
// registers.
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

}  // namespace flash_attn_ext::tile
