// Writes a warp's 16 rows of 16-bit elements through a tile in shared memory, by TMA or by stores of the warp itself.
// The code is short, because code that runs once for a tile has to wait until it is fetched.
#pragma once

#include <type_traits>

#include "kernels/epilogue/store_rows.cuh"
#include "kernels/sm90/kernel.cuh"
#include "kernels/sm90/tensor_map.h"
#include "ptx/bulk_copy.h"
#include "ptx/global_memory.h"
#include "ptx/math.h"
#include "ptx/stmatrix.h"
#include "tile/sm90/smem_tile.h"

namespace flash_attn_ext::sm90 {

inline constexpr int kSmemRowVectors = tile::kSmemRowBytes / 16;

// Whether something in a thread's two rows is not finite: the sum of 0 times each element, in pairs.
template <class Element>
struct NonFiniteRows {
  uint32_t sums[2][2] = {};

  __device__ __forceinline__ void add(int, float, float) {}
  __device__ __forceinline__ void add_rounded(const uint32_t (&words)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[i % 2][i / 2] = ptx::multiply_add_pairs(words[i], 0u, sums[i % 2][i / 2], Element{});
    }
  }
  __device__ __forceinline__ bool of(int r) const { return ((sums[r][0] | sums[r][1]) & 0x7FFF7FFFu) != 0; }
};

// The same for elements before they are rounded.
struct NonFiniteFloats {
  float zeros[2][2] = {};

  __device__ __forceinline__ void add(int r, float low, float high) {
    zeros[r][0] = fmaf(low, 0.0f, zeros[r][0]);
    zeros[r][1] = fmaf(high, 0.0f, zeros[r][1]);
  }
  __device__ __forceinline__ void add_rounded(const uint32_t (&)[4]) {}
  __device__ __forceinline__ bool of(int r) const { return zeros[r][0] + zeros[r][1] != 0.0f; }
};

// Writes to rows [first_row, ...) of the tile at an address, in the layout that the TMA reads.
template <class Element, class NonFinite, class Tile>
__device__ __forceinline__ NonFinite stage_rows(const auto& acc, uint32_t staging, int first_row) {
  using Acc = std::remove_cvref_t<decltype(acc)>;
  static_assert(Acc::kThreadRows == 2 && 8 * Acc::kColumnTiles <= Tile::kColumns);
  const uint32_t lane = tile::lane();
  const uint32_t own = staging + (first_row + lane % 16) * tile::kSmemRowBytes;
  const uint32_t own_vector = lane / 16 ^ lane % 8;
  NonFinite found;
#pragma unroll
  for (int j = 0; j < Acc::kColumnTiles; j += 2) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float low = acc.at(i % 2, j + i / 2, 0);
      const float high = acc.at(i % 2, j + i / 2, 1);
      found.add(i % 2, low, high);
      words[i] = ptx::pack(low, high, Element{});
    }
    ptx::store_matrix_x4(own + j / kSmemRowVectors * Tile::kChunkBytes + (own_vector ^ j % kSmemRowVectors) * 16,
                         words);
    found.add_rounded(words);
  }
  return found;
}
template <class Element, class Tile>
__device__ __forceinline__ NonFiniteRows<Element> stage_rows(const auto& acc, Tile& staging, int first_row) {
  return stage_rows<Element, NonFiniteRows<Element>, Tile>(acc, ptx::shared_address(&staging), first_row);
}

// Whether something in those of a thread's rows that exist is not finite.
template <class Acc>
__device__ __forceinline__ bool needs_recompute(const auto& found, int rows) {
  return (Acc::row(0) < rows && found.of(0)) || (Acc::row(1) < rows && found.of(1));
}

// Writes from there to any target, by stores of the warp itself.
template <class Element, class Tile>
__device__ __forceinline__ void store_staged_rows(const OutputRows<Element>& target, const Tile& staging,
                                                  int first_row) {
  constexpr int kVectorsOfRow = kSmemRowVectors * Tile::kChunks;
  constexpr int kElements = 16 / sizeof(Element);
  const bool in_chunks = target.in_chunks();
  const uint32_t rows = ptx::shared_address(&staging) + first_row * tile::kSmemRowBytes;
#pragma unroll 1
  for (int first = 0; first < OutputMap::kRows * kVectorsOfRow; first += tile::kWarpSize) {
    const int row = (first + tile::lane()) / kVectorsOfRow;
    const int vector = (first + tile::lane()) % kVectorsOfRow;
    const int column = vector * kElements;
    if (row >= target.rows || column >= target.columns) continue;
    const uint4 words = ptx::load_shared_16(rows + vector / kSmemRowVectors * Tile::kChunkBytes +
                                            row * tile::kSmemRowBytes + (vector % kSmemRowVectors ^ row % 8) * 16);
    Element* to = target.data + row * target.row_stride + column * target.column_stride;
    if (in_chunks) {
      ptx::store_global_16(to, words);
      continue;
    }
    const auto* elements = reinterpret_cast<const Element*>(&words);
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      if (column + e < target.columns) to[e * target.column_stride] = elements[e];
    }
  }
  __syncwarp();
}

// It uses rows [first_row, ...) of a tile that is otherwise unused from then on. Lane 0 may release the tile after
// ptx::wait_until_read(). at: where the rows are in the tensor of the map; `target` is where they are otherwise.
// Returns whether one of the thread's elements in an existing row is not finite.
template <class Element, class Acc, class Tile>
__device__ __forceinline__ bool tma_store_rows(const OutputRows<Element>& target, const OutputMap& map,
                                               ptx::TmaCoordinate at, const Acc& acc, Tile& staging, int first_row) {
  const auto found = stage_rows<Element>(acc, staging, first_row);
  ptx::fence_stores();
  __syncwarp();
  // The TMA leaves out rows after the tensor's last one, but not those that belong to another sequence.
  const bool whole = target.rows >= OutputMap::kRows || at.row + target.rows == map.rows;
  if (uniform(map.exists && whole) != 0) {  // otherwise ptxas keeps no pipeline stage of any loop in uniform registers
    if (tile::lane() == 0) {
      at.head *= map.boxes.head_step;
      at.batch *= map.boxes.batch_step;
#pragma unroll
      for (int chunk = 0; chunk < Tile::kChunks; ++chunk, at.column += tile::kSmemChunkColumns) {
        ptx::store_box(map.boxes.map, ptx::shared_address(staging.data[chunk][first_row]), at);
      }
      ptx::commit_stores();
    }
    __syncwarp();
  } else {
    store_staged_rows(target, staging, first_row);
  }
  return needs_recompute<Acc>(found, target.rows);
}

// Stages rows in the same way, and writes them by stores of the warp itself to a target that consists of 16-byte
// chunks, 128 neighbouring bytes of a row at a time. The stores are marked evict-first in L2 (st.cs), so that L2 keeps
// what other tiles read and add to.
template <class Element, class Acc, class Tile>
__device__ __forceinline__ bool store_row_lines(const OutputRows<Element>& target, const Acc& acc, Tile& staging,
                                                int first_row) {
  const uint32_t rows = ptx::shared_address(&staging) + first_row * tile::kSmemRowBytes;
  const auto found = stage_rows<Element, NonFiniteFloats, Tile>(acc, rows, 0);
  __syncwarp();
  const uint32_t lane = tile::lane();
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
      if (chunk * tile::kSmemChunkColumns < columns) ptx::stream_global_16(to + chunk * tile::kSmemChunkColumns, words);
    }
  }
  __syncwarp();
  return needs_recompute<Acc>(found, target.rows);
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
