// Operands of a warp's GEMM, read from shared tiles: which elements each lane reads.
//
// Of a step's left operand (16 x kInner), a lane holds a[0..3]: rows g and g + 8 of the first half of the inner
// indices, then of the second half (g = lane / 4). Of the right operand (kInner x 8), it holds both halves for column
// g; b[0..1] are those of one block of 8 result columns, and b[2..3] those of the next block.
#pragma once

#include "ptx/ldmatrix.h"
#include "tile/accumulator.h"
#include "tile/shared_tile.h"

namespace flash_attn_ext::tile {

template <class Tile>
struct LeftOperand {
  LaneAddress<Tile> lane_address;

  __device__ __forceinline__ LeftOperand(const Tile& tile, int first_row)
      : lane_address(tile, first_row + lane() % 16, lane() / 16 * Tile::kChunk) {}

  __device__ __forceinline__ void load(uint32_t (&a)[4], int row, int k) const {
    ptx::load_matrix_x4(a, lane_address.at(row, k));
  }
};

// A right operand whose tile's rows are result columns (K in Q K^T).
template <class Tile>
struct RightOperandRows {
  LaneAddress<Tile> lane_address;

  __device__ __forceinline__ explicit RightOperandRows(const Tile& tile)
      : lane_address(tile, lane() % 8 + lane() / 16 * 8, lane() / 8 % 2 * Tile::kChunk) {}

  __device__ __forceinline__ void load(uint32_t (&b)[4], int row, int k) const {
    ptx::load_matrix_x4(b, lane_address.at(row, k));
  }
};

// A right operand whose tile's rows are inner indices (V in P V), in the order of to_operand.
template <class Tile>
struct RightOperandColumns {
  using Element = typename Tile::Element;
  LaneAddress<Tile> first;
  LaneAddress<Tile> second;  // ldmatrix transposes 16-bit elements only; others are read one by one, from two rows

  __device__ __forceinline__ RightOperandColumns(const Tile& tile, int first_column)
      : first(sizeof(Element) == 2 ? LaneAddress<Tile>{tile, lane() % 16, first_column + lane() / 16 * 8}
                                   : LaneAddress<Tile>{tile, 2 * (lane() % 4), first_column + lane() / 4}),
        second(tile, 2 * (lane() % 4) + 1, first_column + lane() / 4) {}

  __device__ __forceinline__ void load(uint32_t (&b)[4], int k, int column) const {
    if constexpr (sizeof(Element) == 2) {
      ptx::load_matrix_x4_transposed(b, first.at(k, column));
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        b[2 * half] = ptx::load_shared(first.at(k, column + 8 * half));
        b[2 * half + 1] = ptx::load_shared(second.at(k, column + 8 * half));
      }
    }
  }
};

}  // namespace flash_attn_ext::tile
