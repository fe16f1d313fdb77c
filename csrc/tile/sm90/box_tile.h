// A tile of rows in shared memory as the copy engine writes it and warpgroup-wide products read it: chunks of 64
// columns, each with its rows one behind the other, 128 bytes apart, swizzled over 8 rows (PTX ISA, "shared
// memory layout" of wgmma.mma_async).
#pragma once

#include <cstdint>

#include "ptx/math.h"
#include "ptx/shared_memory.h"
#include "ptx/tensor_copy.h"

namespace flash_attn_ext::tile {

inline constexpr int kBoxRowBytes = 128;              // of a chunk: what the swizzle spans
inline constexpr int kBoxColumns = kBoxRowBytes / 2;  // of 16-bit elements

template <class ElementType, int kRowsValue, int kColumnsValue>
struct BoxTile {
  using Element = ElementType;
  static_assert(sizeof(Element) == 2 && kRowsValue % 8 == 0);
  static constexpr int kRows = kRowsValue;
  static constexpr int kColumns = kColumnsValue;
  static constexpr int kChunks = (kColumns + kBoxColumns - 1) / kBoxColumns;
  static constexpr int kChunkBytes = kRows * kBoxRowBytes;
  static constexpr int kBytes = kChunks * kChunkBytes;

  alignas(1024) Element data[kChunks][kRows][kBoxColumns];

  // Starts the copy of all chunks, kBytes in all. at.column: of the first. policy: a ptx::CachePolicy, or none.
  template <class... Policy>
  __device__ __forceinline__ void copy(const CUtensorMap& map, ptx::Barrier& barrier, ptx::BoxOrigin at,
                                       Policy... policy) {
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk, at.column += kBoxColumns) {
      ptx::copy_box(data[chunk], map, barrier, at, policy...);
    }
  }
};

// The same with a chunk of ones behind the others: products with it add up rows of the left operand too.
template <class Element, int kRows, int kColumns>
struct BoxTileWithOnes : BoxTile<Element, kRows, kColumns> {
  alignas(1024) Element ones[kRows][kBoxColumns];

  // By `threads` threads, of which this is the one with that number: they then need a fence and a barrier.
  __device__ __forceinline__ void set_ones(int thread, int threads) {
    const uint32_t pair = ptx::pack(1.0f, 1.0f, Element{});
    auto* chunks = reinterpret_cast<uint4*>(ones);
    for (int i = thread; i < static_cast<int>(sizeof(ones) / sizeof(uint4)); i += threads) {
      chunks[i] = {pair, pair, pair, pair};
    }
  }
};

// Where matrix descriptors of such a tile begin (PTX ISA, "matrix descriptor format"): addresses in units of 16 bytes,
// 14 bits.
template <class Tile>
struct BoxOperand {
  static constexpr uint32_t kUnit = 16;

  uint32_t first;

  __device__ __forceinline__ explicit BoxOperand(uint32_t address) : first(address) {}
  __device__ __forceinline__ explicit BoxOperand(const Tile& tile)
      : first(ptx::shared_address(&tile) / kUnit & 0x3FFFu) {}

  // The operand of the tile `count` places further in an array.
  __device__ __forceinline__ BoxOperand after(int count) const {
    BoxOperand other = *this;
    other.first += count * static_cast<uint32_t>(sizeof(Tile) / kUnit);
    return other;
  }

  // Another tile that begins at the same place.
  template <class Other>
  __device__ __forceinline__ BoxOperand<Other> as() const {
    return BoxOperand<Other>(first);
  }

  // The operand of rows [row, ...), a multiple of 8.
  __device__ __forceinline__ BoxOperand from_row(int row) const {
    BoxOperand other = *this;
    other.first += row * (kBoxRowBytes / kUnit);
    return other;
  }

  // Columns [16 step, ...) of all rows, the inner dimension along the rows.
  __device__ __forceinline__ uint64_t columns(int step) const {
    constexpr int kSteps = kBoxColumns / 16;
    return descriptor(first + step / kSteps * (Tile::kChunkBytes / kUnit) + step % kSteps * (32 / kUnit), kUnit);
  }

  // Rows [16 step, ...) of all columns from a chunk on, the inner dimension across the rows.
  __device__ __forceinline__ uint64_t rows(int step, int chunk = 0) const {
    return descriptor(first + (step * 16 * kBoxRowBytes + chunk * Tile::kChunkBytes) / kUnit, Tile::kChunkBytes);
  }

 private:
  // Groups of 8 rows lie 1024 bytes apart, and chunks of columns leading_bytes; bit 62: swizzled over 128 bytes.
  // Added, not joined bit by bit: the compiler adds up the constants, and a step is one instruction.
  __device__ __forceinline__ static uint64_t descriptor(uint32_t address, uint32_t leading_bytes) {
    return uint64_t{address + (leading_bytes / kUnit << 16)} | uint64_t{1024 / kUnit | 1u << 30} << 32;
  }
};

}  // namespace flash_attn_ext::tile
