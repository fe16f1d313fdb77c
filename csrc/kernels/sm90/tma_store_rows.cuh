// Writes a warp's 16 rows of 16-bit elements by TMA, through a tile in shared memory. The code is short, because code
// that runs once for a tile has to wait until it is fetched.
#pragma once

#include "kernels/epilogue/store_rows.cuh"
#include "kernels/sm90/kernel.cuh"
#include "kernels/sm90/tensor_map.h"
#include "ptx/bulk_copy.h"
#include "ptx/math.h"
#include "ptx/stmatrix.h"
#include "tile/sm90/smem_tile.h"

namespace flash_attn_ext::sm90 {

// Whether something in a thread's two rows is not finite: the sum of 0 times each element, in pairs.
struct NonFiniteRows {
  uint32_t sums[2][2] = {};

  template <class Element>
  __device__ __forceinline__ void add(int r, int chain, uint32_t pair) {
    sums[r][chain] = ptx::multiply_add_pairs(pair, 0u, sums[r][chain], Element{});
  }
  __device__ __forceinline__ bool of(int r) const { return ((sums[r][0] | sums[r][1]) & 0x7FFF7FFFu) != 0; }
};

// Writes to rows [first_row, ...) of the tile, in the layout that the TMA reads.
template <class Element, class Acc, class Tile>
__device__ __forceinline__ NonFiniteRows stage_rows(const Acc& acc, Tile& staging, int first_row) {
  static_assert(Acc::kThreadRows == 2 && 8 * Acc::kColumnTiles <= Tile::kColumns);
  constexpr int kSmemRowVectors = tile::kSmemRowBytes / 16;
  const uint32_t lane = tile::lane();
  const uint32_t own = ptx::shared_address(&staging) + (first_row + lane % 16) * tile::kSmemRowBytes;
  const uint32_t own_vector = lane / 16 ^ lane % 8;
  NonFiniteRows found;
#pragma unroll
  for (int j = 0; j < Acc::kColumnTiles; j += 2) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = ptx::pack(acc.at(i % 2, j + i / 2, 0), acc.at(i % 2, j + i / 2, 1), Element{});
    }
    ptx::store_matrix_x4(own + j / kSmemRowVectors * Tile::kChunkBytes + (own_vector ^ j % kSmemRowVectors) * 16,
                         words);
#pragma unroll
    for (int i = 0; i < 4; ++i) found.add<Element>(i % 2, i / 2, words[i]);
  }
  return found;
}

// Writes from there to any target, by stores of the warp itself.
template <class Element, class Tile>
__device__ __forceinline__ void store_staged_rows(const OutputRows<Element>& target, const Tile& staging,
                                                  int first_row) {
  constexpr int kSmemRowVectors = tile::kSmemRowBytes / 16;
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
  const NonFiniteRows found = stage_rows<Element>(acc, staging, first_row);
  ptx::fence_stores();
  __syncwarp();
  // The TMA leaves out rows behind the tensor's last one, but not those that belong to another sequence.
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
  return (Acc::row(0) < target.rows && found.of(0)) || (Acc::row(1) < target.rows && found.of(1));
}

}  // namespace flash_attn_ext::sm90
