// Products of one warp on shared tiles.
#pragma once

#include "ptx/ldmatrix.h"
#include "ptx/mma.h"
#include "tile/fragment.h"
#include "tile/shared_tile.h"

namespace flash_attn_ext::tile {

// The lane addresses of an operand's 16 x 16 blocks: of a left operand,
template <class Tile>
__device__ __forceinline__ LaneAddress<Tile> left_operand(const Tile& tile, int first_row) {
  return {tile, first_row + lane() % 16, lane() / 16 * 8};
}
// of a right operand whose tile's rows are result columns (K in Q K^T),
template <class Tile>
__device__ __forceinline__ LaneAddress<Tile> right_operand_rows(const Tile& tile) {
  return {tile, lane() % 8 + lane() / 16 * 8, lane() / 8 % 2 * 8};
}
// and of one whose tile's rows are inner indices (V in P V). Both give b[0..1] for the first 8 result columns of a
// block and b[2..3] for the others.
template <class Tile>
__device__ __forceinline__ LaneAddress<Tile> right_operand_columns(const Tile& tile) {
  return {tile, lane() % 16, lane() / 16 * 8};
}

// acc += left rows [first_row, ...) . right^T, both (rows x kColumns); acc's columns are right's rows.
template <class Acc, class LeftTile, class RightTile>
__device__ __forceinline__ void multiply_rows(Acc& acc, const LeftTile& left, int first_row, const RightTile& right) {
  using Element = typename LeftTile::Element;
  const LaneAddress<LeftTile> left_address = left_operand(left, first_row);
  const LaneAddress<RightTile> right_address = right_operand_rows(right);
#pragma unroll
  for (int k = 0; k < LeftTile::kColumns; k += 16) {
    uint32_t a[Acc::kRowTiles][4];
#pragma unroll
    for (int i = 0; i < Acc::kRowTiles; ++i) ptx::load_matrix_x4(a[i], left_address.at(16 * i, k));
#pragma unroll
    for (int j = 0; j < Acc::kColumnTiles; j += 2) {
      uint32_t b[4];
      ptx::load_matrix_x4(b, right_address.at(8 * j, k));
#pragma unroll
      for (int i = 0; i < Acc::kRowTiles; ++i) {
        ptx::multiply_accumulate(acc.c[i][j], a[i], b[0], b[1], Element{});
        ptx::multiply_accumulate(acc.c[i][j + 1], a[i], b[2], b[3], Element{});
      }
    }
  }
}

// acc += left . right, left an accumulator in registers (rounded to Element), right's rows its columns.
template <class Acc, class LeftAcc, class RightTile>
__device__ __forceinline__ void multiply_registers(Acc& acc, const LeftAcc& left, const RightTile& right) {
  using Element = typename RightTile::Element;
  const LaneAddress<RightTile> right_address = right_operand_columns(right);
#pragma unroll
  for (int k = 0; k < LeftAcc::kColumnTiles / 2; ++k) {
    uint32_t a[Acc::kRowTiles][4];
#pragma unroll
    for (int i = 0; i < Acc::kRowTiles; ++i) to_operand<Element>(a[i], left, i, k);
#pragma unroll
    for (int j = 0; j < Acc::kColumnTiles; j += 2) {
      uint32_t b[4];
      ptx::load_matrix_x4_transposed(b, right_address.at(16 * k, 8 * j));
#pragma unroll
      for (int i = 0; i < Acc::kRowTiles; ++i) {
        ptx::multiply_accumulate(acc.c[i][j], a[i], b[0], b[1], Element{});
        ptx::multiply_accumulate(acc.c[i][j + 1], a[i], b[2], b[3], Element{});
      }
    }
  }
}

}  // namespace flash_attn_ext::tile
