// A tile in shared memory in the layout that TMA writes and wgmma reads: chunks of 64 columns. The rows of a chunk are
// 128 bytes apart and swizzled over 8 rows (PTX ISA, "shared memory layout" of wgmma.mma_async).
#pragma once

#include <cstdint>

#include "attention/division.h"
#include "ptx/math.h"
#include "ptx/shared_memory.h"
#include "ptx/tensor_copy.h"

namespace flash_attn_ext::tile {

inline constexpr int kSmemRowBytes = 128;                    // of a chunk: the span of the swizzle
inline constexpr int kSmemChunkColumns = kSmemRowBytes / 2;  // of 16-bit elements

template <class ElementType, int kRowsValue, int kColumnsValue>
struct SmemTile {
  using Element = ElementType;
  static_assert(sizeof(Element) == 2 && kRowsValue % 8 == 0);
  static constexpr int kRows = kRowsValue;
  static constexpr int kColumns = kColumnsValue;
  static constexpr int kChunks = attention::ceil_div(kColumns, kSmemChunkColumns);
  static constexpr int kChunkBytes = kRows * kSmemRowBytes;
  static constexpr int kBytes = kChunks * kChunkBytes;

  alignas(1024) Element data[kChunks][kRows][kSmemChunkColumns];

  // Issues the TMA loads of all chunks, kBytes together. at.column: that of the first chunk. policy: a
  // ptx::CachePolicy, or none.
  template <class... Policy>
  __device__ __forceinline__ void copy(const CUtensorMap& map, ptx::Barrier& barrier, ptx::TmaCoordinate at,
                                       Policy... policy) {
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk, at.column += kSmemChunkColumns) {
      ptx::copy_box(data[chunk], map, barrier, at, policy...);
    }
  }

  // Clears rows [first, kRows). Called by `threads` threads, each with its index. A fence and a barrier must follow.
  __device__ __forceinline__ void clear_rows(int first, int thread, int threads) {
    constexpr int kVectors = kSmemRowBytes / sizeof(uint4);
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      auto* const vectors = reinterpret_cast<uint4*>(data[chunk]);
      for (int i = first * kVectors + thread; i < kRows * kVectors; i += threads) vectors[i] = {};
    }
  }
};

// The same with a chunk of ones after the others, so that a GEMM also computes the row sums of its left operand.
template <class Element, int kRows, int kColumns>
struct SmemTileWithOnes : SmemTile<Element, kRows, kColumns> {
  alignas(1024) Element ones[kRows][kSmemChunkColumns];

  // Called by `threads` threads, each with its index. A fence and a barrier must follow.
  __device__ __forceinline__ void set_ones(int thread, int threads) {
    const uint32_t pair = ptx::pack(1.0f, 1.0f, Element{});
    auto* chunks = reinterpret_cast<uint4*>(ones);
    for (int i = thread; i < static_cast<int>(sizeof(ones) / sizeof(uint4)); i += threads) {
      chunks[i] = {pair, pair, pair, pair};
    }
  }
};

// The matrix descriptors of such a tile (PTX ISA, "matrix descriptor format"): 14-bit addresses in units of 16 bytes.
template <class Tile>
struct SmemOperand {
  static constexpr uint32_t kUnit = 16;

  uint32_t first;

  __device__ __forceinline__ explicit SmemOperand(uint32_t address) : first(address) {}
  __device__ __forceinline__ explicit SmemOperand(const Tile& tile)
      : first(ptx::shared_address(&tile) / kUnit & 0x3FFFu) {}

  // The descriptor of the tile `count` places further in an array.
  __device__ __forceinline__ SmemOperand after(int count) const {
    SmemOperand other = *this;
    other.first += count * static_cast<uint32_t>(sizeof(Tile) / kUnit);
    return other;
  }

  // A tile of another shape at the same address.
  template <class Other>
  __device__ __forceinline__ SmemOperand<Other> as() const {
    return SmemOperand<Other>(first);
  }

  // The descriptor of rows [row, ...); row is a multiple of 8.
  __device__ __forceinline__ SmemOperand from_row(int row) const {
    SmemOperand other = *this;
    other.first += row * (kSmemRowBytes / kUnit);
    return other;
  }

  // Columns [16 step, ...) of all rows, the inner dimension along the rows.
  __device__ __forceinline__ uint64_t columns(int step) const {
    constexpr int kSteps = kSmemChunkColumns / 16;
    return descriptor(first + step / kSteps * (Tile::kChunkBytes / kUnit) + step % kSteps * (32 / kUnit), kUnit);
  }

  // Rows [16 step, ...) of all columns from a chunk on, the inner dimension across the rows.
  __device__ __forceinline__ uint64_t rows(int step, int chunk = 0) const {
    return descriptor(first + (step * 16 * kSmemRowBytes + chunk * Tile::kChunkBytes) / kUnit, Tile::kChunkBytes);
  }

 private:
  // Groups of 8 rows are 1024 bytes apart, chunks of columns leading_bytes; bit 62 selects the 128-byte swizzle. The
  // fields are added, not or-ed, so that the compiler folds the constants and a step is one instruction.
  __device__ __forceinline__ static uint64_t descriptor(uint32_t address, uint32_t leading_bytes) {
    return uint64_t{address + (leading_bytes / kUnit << 16)} | uint64_t{1024 / kUnit | 1u << 30} << 32;
  }
};

}  // namespace flash_attn_ext::tile
