// Copies rows of a global matrix to shared tiles with cp.async. The threads of the CTA share the work, and each commits
// its own copies.
#pragma once

#include <cstdint>

#include "ptx/cp_async.h"
#include "ptx/pin.h"
#include "tile/shared_tile.h"
#include "tile/sm80/strides.h"

namespace flash_attn_ext::tile {

// Rows of a global tensor: consecutive rows `stride` elements apart, of which `columns` are valid.
template <class Element>
struct GlobalRows {
  const Element* data;
  int64_t stride;
  int columns;
};

// The place of a thread's 16 bytes in each kRowStep rows, and in each Tile::kGroup columns, of a tile.
//
// Index is the type that this is computed in. It only changes which registers ptxas has left. An int is faster in the
// forward kernels up to head dim 128, and scale-only kernels of head dim 128 spill without it
// (docs/kernels/log/sm80_forward.md, "What worked").
template <int kThreads, class Tile, class Index = unsigned>
struct CopyPlace {
  static constexpr int kChunks = Tile::kGroup / Tile::kChunk;
  static constexpr int kRowStep = kThreads / kChunks;
  static_assert(kRowStep % 8 == 0);  // the swizzle repeats

  __device__ __forceinline__ static int row() { return static_cast<int>(static_cast<Index>(threadIdx.x) / kChunks); }
  __device__ __forceinline__ static int column() {
    return static_cast<int>(static_cast<Index>(threadIdx.x) % kChunks * Tile::kChunk);
  }
};

// Issues the copies of rows [0, num_rows) into the tile. Invalid rows and columns are zero-padded, within the first
// tile_rows rows of the tile.
template <int kThreads, class Index = unsigned, class Tile>
__device__ __forceinline__ void copy_some_rows_async(Tile& tile, const GlobalRows<typename Tile::Element>& rows,
                                                     int num_rows, int tile_rows = Tile::kRows) {
  using Element = typename Tile::Element;
  using Place = CopyPlace<kThreads, Tile, Index>;
  const int first_row = Place::row();
  const int first_column = Place::column();
  const Element* source = rows.data + first_row * rows.stride + first_column;
  uint32_t target = tile.address(first_row, first_column);
#pragma unroll 1
  for (int row = first_row; row < tile_rows; row += Place::kRowStep) {
#pragma unroll
    for (int column = 0; column < Tile::kColumns; column += Tile::kGroup) {
      const int valid = row < num_rows ? min(max(rows.columns - first_column - column, 0), Tile::kChunk) : 0;
      ptx::copy_async_16(target + column * sizeof(Element), source + column, valid * sizeof(Element));
    }
    source += Place::kRowStep * rows.stride;
    target += Place::kRowStep * Tile::kRowBytes;
  }
}

// The same for a tile that is copied once: a whole tile is copied without tests.
template <int kThreads, class Index = unsigned, class Tile>
__device__ __forceinline__ void copy_rows_async(Tile& tile, const GlobalRows<typename Tile::Element>& rows,
                                                int num_rows) {
  using Element = typename Tile::Element;
  using Place = CopyPlace<kThreads, Tile, Index>;
  if (num_rows < Tile::kRows || rows.columns < Tile::kColumns) {
    copy_some_rows_async<kThreads, Index>(tile, rows, num_rows);
    return;
  }
  const int first_row = Place::row();
  const int first_column = Place::column();
  if (Tile::kRows < Place::kRowStep && first_row >= Tile::kRows) return;
  const Element* source = rows.data + first_row * rows.stride + first_column;
  const uint32_t target = tile.address(first_row, first_column);
#pragma unroll
  for (int row = 0; row < Tile::kRows; row += Place::kRowStep) {
#pragma unroll
    for (int column = 0; column < Tile::kColumns; column += Tile::kGroup) {
      ptx::copy_async_16(target + (row * Tile::kColumns + column) * sizeof(Element), source + column, 16);
    }
    source += Place::kRowStep * rows.stride;
  }
}

// The same for a matrix as wide as the tile, whose rows are less than kLongStride apart.
template <int kThreads, class Index = unsigned, class Tile>
__device__ __forceinline__ void copy_full_width_async(Tile& tile, const GlobalRows<typename Tile::Element>& rows,
                                                      int num_rows) {
  using Element = typename Tile::Element;
  using Place = CopyPlace<kThreads, Tile, Index>;
  static_assert(Tile::kColumns == Tile::kGroup);
  const auto* source = reinterpret_cast<const char*>(rows.data + Place::row() * rows.stride + Place::column());
  const uint32_t step_bytes = static_cast<uint32_t>(rows.stride) * (Place::kRowStep * sizeof(Element));
  const uint32_t target = tile.address(Place::row(), Place::column());
#pragma unroll
  for (int step = 0; step < Tile::kRows / Place::kRowStep; ++step) {
    const bool exists = Place::row() + step * Place::kRowStep < num_rows;
    ptx::copy_async_16(target + step * Place::kRowStep * Tile::kRowBytes,
                       source + static_cast<uint64_t>(step_bytes) * step, exists ? 16 : 0);
  }
}

// The same for a tile that holds all rows of a short sequence. The copies of a group of columns are unrolled, without a
// case for whole tiles. The caller guarantees that kRows * row_bytes fits 32 bits.
template <int kThreads, class Tile>
__device__ __forceinline__ void copy_sequence_async(Tile& tile, const GlobalRows<typename Tile::Element>& rows,
                                                    int num_rows) {
  using Place = CopyPlace<kThreads, Tile>;
  constexpr uint32_t kBytes = sizeof(typename Tile::Element);
  const auto* first = reinterpret_cast<const char*>(rows.data);
  const uint32_t row_bytes = static_cast<uint32_t>(rows.stride) * kBytes;
  const uint32_t target = tile.address(Place::row(), Place::column());
#pragma unroll 1
  for (int group = 0; group < Tile::kColumns; group += Tile::kGroup) {
    const int column = group + Place::column();
    const auto bytes = static_cast<uint32_t>(min(max(rows.columns - column, 0), Tile::kChunk)) * kBytes;
#pragma unroll
    for (int row = 0; row < Tile::kRows; row += Place::kRowStep) {
      const uint32_t offset = (Place::row() + row) * row_bytes + column * kBytes;
      ptx::copy_async_16(target + row * Tile::kRowBytes + group * kBytes, first + offset,
                         Place::row() + row < num_rows ? bytes : 0);
    }
  }
}

// Issues the copies of tiles of one matrix, in any order. A thread keeps its place in the matrix and in a tile, so that
// a whole tile takes one multiplication per 16 bytes.
template <int kThreads, class TileType, class Index = unsigned>
struct TileSource {
  using Tile = TileType;
  using Element = typename Tile::Element;
  using Place = CopyPlace<kThreads, Tile, Index>;
  static constexpr int kSteps = Tile::kRows / Place::kRowStep;

  GlobalRows<Element> rows;
  int num_rows;
  const char* source;   // the thread's first 16 bytes of tile 0
  uint32_t step_bytes;  // between two rows of the thread
  uint32_t place;       // of the thread's first 16 bytes in a shared tile

  __device__ __forceinline__ TileSource(const GlobalRows<Element>& rows, int num_rows)
      : rows(rows),
        num_rows(num_rows),
        source(reinterpret_cast<const char*>(rows.data + Place::row() * rows.stride + Place::column())),
        step_bytes(ptx::pin(static_cast<int>(Place::kRowStep * rows.stride * sizeof(Element)))),
        place(Place::row() * Tile::kRowBytes +
              Tile::swizzled_chunk(Place::row(), Place::column() / Tile::kChunk) * 16) {}

  // Whether tiles inside the matrix can be copied by copy_whole: they have all columns, and the stride of their rows
  // fits 32 bits.
  __device__ __forceinline__ bool regular() const {
    return rows.columns >= Tile::kColumns && rows.stride < kLongStride;
  }

  __device__ __forceinline__ void copy_whole(Tile& tile, int index) const {
    const uint32_t target = ptx::shared_address(tile.data) + place;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const char* from = source + static_cast<uint64_t>(static_cast<uint32_t>(index * kSteps + step)) * step_bytes;
#pragma unroll
      for (int column = 0; column < Tile::kColumns; column += Tile::kGroup) {
        ptx::copy_async_16(target + step * Place::kRowStep * Tile::kRowBytes + column * sizeof(Element),
                           from + column * sizeof(Element), 16);
      }
    }
  }

  // Copies the first `wanted` rows of the tile.
  __device__ __forceinline__ void copy_some(Tile& tile, int index, int wanted = Tile::kRows) const {
    const int first_row = index * Tile::kRows;
    copy_some_rows_async<kThreads, Index>(tile, {rows.data + first_row * rows.stride, rows.stride, rows.columns},
                                          num_rows - first_row, wanted);
  }

  // Copies tile `index`, where the first `whole` tiles are whole. Without cached addresses a thread computes them for
  // each tile, and no register holds them.
  template <bool kCachesAddress = true>
  __device__ __forceinline__ void copy(Tile& tile, int index, int whole) const {
    if constexpr (!kCachesAddress) {
      const int first_row = index * Tile::kRows;
      copy_rows_async<kThreads, Index>(tile, {rows.data + first_row * rows.stride, rows.stride, rows.columns},
                                       num_rows - first_row);
    } else if (index < whole) {
      copy_whole(tile, index);
    } else {
      copy_some(tile, index);
    }
  }
};

}  // namespace flash_attn_ext::tile
