// GEMMs of one warp on shared tiles, with their tangents by the product rule.
#pragma once

#include <type_traits>

#include "tile/accumulator.h"
#include "tile/shared_tile.h"
#include "tile/sm80/operand.h"
#include "tile/sm80/step.h"

namespace flash_attn_ext::tile {

// A tile and its tangent. Row r of the tangent lies where the tile would have row kRows + r, so one address leads to
// both.
template <class Tile>
struct DualTile {
  Tile primal;
  Tile tangent;
  static_assert(Tile::kRows % 8 == 0);  // the swizzle repeats
};

// products += left rows [first_row, ...) . right^T and tangents += left' . right^T + left . right'^T, where all have
// kColumns columns. Each operand is read once. In float32, small terms have sums of their own (Sums::kSeparate).
template <class Acc, class Left, class Right>
__device__ __forceinline__ void multiply_rows_and_tangents(Acc& products, Acc& tangents, const DualTile<Left>& left,
                                                           int first_row, const DualTile<Right>& right) {
  using Element = typename Left::Element;
  constexpr bool kSeparate = std::is_same_v<Element, float>;
  const LeftOperand<Left> left_operand(left.primal, first_row);
  const RightOperandRows<Right> right_operand(right.primal);
  Acc small_products;
  Acc small_tangents;
  if constexpr (kSeparate) {
    small_products.clear();
    small_tangents.clear();
  }
  const auto step = [](float(&sum)[4], float(&small_terms)[4], const uint32_t(&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (kSeparate) {
      multiply_split(sum, small_terms, a, b0, b1);
    } else {
      multiply_step<Element>(sum, a, b0, b1);
    }
  };
#pragma unroll
  for (int k = 0; k < Left::kColumns; k += kInner<Element>) {
    uint32_t a[2][Acc::kRowTiles][4];
#pragma unroll
    for (int which = 0; which < 2; ++which) {
#pragma unroll
      for (int i = 0; i < Acc::kRowTiles; ++i) left_operand.load(a[which][i], which * Left::kRows + 16 * i, k);
    }
#pragma unroll
    for (int j = 0; j < Acc::kColumnTiles; j += 2) {
      uint32_t b[2][4];
#pragma unroll
      for (int which = 0; which < 2; ++which) right_operand.load(b[which], which * Right::kRows + 8 * j, k);
#pragma unroll
      for (int i = 0; i < Acc::kRowTiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          step(products.c[i][j + h], small_products.c[i][j + h], a[0][i], b[0][2 * h], b[0][2 * h + 1]);
          step(tangents.c[i][j + h], small_tangents.c[i][j + h], a[1][i], b[0][2 * h], b[0][2 * h + 1]);
          step(tangents.c[i][j + h], small_tangents.c[i][j + h], a[0][i], b[1][2 * h], b[1][2 * h + 1]);
        }
      }
    }
  }
  if constexpr (kSeparate) {
    products.add(small_products);
    tangents.add(small_tangents);
  }
}

// acc += left . right + left_of_tangent . right', with accumulators on the left, as in multiply_registers. Both are
// packed first, which frees their registers. A float32 sum over many tiles is rounded once per tile, outside the tensor
// core.
template <class Acc, class LeftAcc, class Right>
__device__ __forceinline__ void multiply_registers_with_tangent(Acc& acc, const LeftAcc& left,
                                                                const LeftAcc& left_of_tangent,
                                                                const DualTile<Right>& right) {
  using Element = typename Right::Element;
  using Sum = Accumulator<Acc::kRowTiles, 2>;  // of two column tiles at a time
  constexpr bool kOncePerTile = std::is_same_v<Element, float>;
  constexpr int kSteps = 8 * LeftAcc::kColumnTiles / kInner<Element>;
  const RightOperandColumns<Right> right_operand(right.primal, 0);
  uint32_t a[2][kSteps][Acc::kRowTiles][4];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
#pragma unroll
    for (int i = 0; i < Acc::kRowTiles; ++i) {
      to_operand<Element>(a[0][k][i], left, i, k);
      to_operand<Element>(a[1][k][i], left_of_tangent, i, k);
    }
  }
#pragma unroll
  for (int j = 0; j < Acc::kColumnTiles; j += 2) {
    Sum sum;
    if constexpr (kOncePerTile) sum.clear();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        uint32_t b[4];
        right_operand.load(b, which * Right::kRows + kInner<Element> * k, 8 * j);
#pragma unroll
        for (int i = 0; i < Acc::kRowTiles; ++i) {
          multiply_step<Element>(kOncePerTile ? sum.c[i][0] : acc.c[i][j], a[which][k][i], b[0], b[1]);
          multiply_step<Element>(kOncePerTile ? sum.c[i][1] : acc.c[i][j + 1], a[which][k][i], b[2], b[3]);
        }
      }
    }
    if constexpr (kOncePerTile) {
#pragma unroll
      for (int r = 0; r < Sum::kThreadRows; ++r) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc.at(r, j + e / 2, e % 2) += sum.at(r, e / 2, e % 2);
      }
    }
  }
}

}  // namespace flash_attn_ext::tile
