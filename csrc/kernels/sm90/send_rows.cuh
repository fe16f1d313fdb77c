// Writes a warp's 16 rows of 16-bit elements by the copy engine, through a tile in shared memory. It takes few
// instructions: code that runs once for a tile waits for them to be fetched.
#pragma once

#include "kernels/epilogue/store_rows.cuh"
#include "kernels/sm90/tensor_map.h"
#include "kernels/sm90/uniform.h"
#include "ptx/bulk_copy.h"
#include "ptx/math.h"
#include "ptx/stmatrix.h"
#include "tile/sm90/box_tile.h"

namespace flash_attn_ext::sm90 {

// Whether something in a thread's two rows is not finite: sums of 0 times each element, in pairs.
struct RowSuspicion {
  uint32_t sums[2][2] = {};

  template <class Element>
  __device__ __forceinline__ void add(int r, int chain, uint32_t pair) {
    sums[r][chain] = ptx::multiply_add_pairs(pair, 0u, sums[r][chain], Element{});
  }
  __device__ __forceinline__ bool of(int r) const { return ((sums[r][0] | sums[r][1]) & 0x7FFF7FFFu) != 0; }
};

// To rows [first_row, ...) of the tile, as the copy engine reads them.
template <class Element, class Acc, class Tile>
__device__ __forceinline__ RowSuspicion stage_rows(const Acc& acc, Tile& staging, int first_row) {
  static_assert(Acc::kThreadRows == 2 && 8 * Acc::kColumnTiles <= Tile::kColumns);
  constexpr int kPieces = tile::kBoxRowBytes / 16;
  const uint32_t lane = tile::lane();
  const uint32_t own = ptx::shared_address(&staging) + (first_row + lane % 16) * tile::kBoxRowBytes;
  const uint32_t own_piece = lane / 16 ^ lane % 8;
  RowSuspicion found;
#pragma unroll
  for (int j = 0; j < Acc::kColumnTiles; j += 2) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = ptx::pack(acc.at(i % 2, j + i / 2, 0), acc.at(i % 2, j + i / 2, 1), Element{});
    }
    ptx::store_matrix_x4(own + j / kPieces * Tile::kChunkBytes + (own_piece ^ j % kPieces) * 16, words);
#pragma unroll
    for (int i = 0; i < 4; ++i) found.add<Element>(i % 2, i / 2, words[i]);
  }
  return found;
}

// From there to any target, by the warp itself.
template <class Element, class Tile>
__device__ __forceinline__ void store_staged_rows(const OutputRows<Element>& target, const Tile& staging,
                                                  int first_row) {
  constexpr int kPieces = tile::kBoxRowBytes / 16;
  constexpr int kPiecesOfRow = kPieces * Tile::kChunks;
  constexpr int kElements = 16 / sizeof(Element);
  const bool in_chunks = target.in_chunks();
  const uint32_t rows = ptx::shared_address(&staging) + first_row * tile::kBoxRowBytes;
#pragma unroll 1
  for (int first = 0; first < OutputMap::kRows * kPiecesOfRow; first += tile::kWarpSize) {
    const int row = (first + tile::lane()) / kPiecesOfRow;
    const int piece = (first + tile::lane()) % kPiecesOfRow;
    const int column = piece * kElements;
    if (row >= target.rows || column >= target.columns) continue;
    const uint4 words = ptx::load_shared_16(rows + piece / kPieces * Tile::kChunkBytes + row * tile::kBoxRowBytes +
                                            (piece % kPieces ^ row % 8) * 16);
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

// Through rows [first_row, ...) of a tile that nobody else uses any more, and that lane 0 may give away after
// ptx::wait_until_read(). at: where the rows are in the tensor of the map, `target` otherwise. Returns whether one of
// the thread's elements in an existing row is not finite.
template <class Element, class Acc, class Tile>
__device__ __forceinline__ bool send_rows(const OutputRows<Element>& target, const OutputMap& map, ptx::BoxOrigin at,
                                          const Acc& acc, Tile& staging, int first_row) {
  const RowSuspicion found = stage_rows<Element>(acc, staging, first_row);
  ptx::fence_stores();
  __syncwarp();
  // The copy engine leaves out rows behind the tensor's last one, not those that belong to others.
  const bool whole = target.rows >= OutputMap::kRows || at.row + target.rows == map.rows;
  if (uniform(map.exists && whole) != 0) {  // else ptxas keeps no stage of any loop in uniform registers
    if (tile::lane() == 0) {
      at.head *= map.boxes.head_step;
      at.batch *= map.boxes.batch_step;
#pragma unroll
      for (int chunk = 0; chunk < Tile::kChunks; ++chunk, at.column += tile::kBoxColumns) {
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
