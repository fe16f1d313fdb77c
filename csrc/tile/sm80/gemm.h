// GEMMs of one warp on shared tiles.
#pragma once

#include <type_traits>

#include "tile/accumulator.h"
#include "tile/shared_tile.h"
#include "tile/sm80/operand.h"
#include "tile/sm80/step.h"

namespace flash_attn_ext::tile {

// acc += left rows [first_row, ...) . right^T, where both have kColumns columns, and the columns of acc are the rows of
// right.
template <class LeftTile, Sums kSums, class Acc>
__device__ __forceinline__ void multiply_rows(
    Acc& acc, const LeftTile& left, int first_row,
    const SharedTile<typename LeftTile::Element, 8 * Acc::kColumnTiles, LeftTile::kColumns>& right) {
  using Element = typename LeftTile::Element;
  using RightTile = std::remove_cvref_t<decltype(right)>;
  constexpr bool kSeparate = std::is_same_v<Element, float> && kSums == Sums::kSeparate;
  Acc small_terms;
  if constexpr (kSeparate) small_terms.clear();
  const LeftOperand<LeftTile> left_operand(left, first_row);
  const RightOperandRows<RightTile> right_operand(right);
#pragma unroll
  for (int k = 0; k < LeftTile::kColumns; k += kInner<Element>) {
    uint32_t a[Acc::kRowTiles][4];
#pragma unroll
    for (int i = 0; i < Acc::kRowTiles; ++i) left_operand.load(a[i], 16 * i, k);
#pragma unroll
    for (int j = 0; j < Acc::kColumnTiles; j += 2) {
      uint32_t b[4];
      right_operand.load(b, 8 * j, k);
#pragma unroll
      for (int i = 0; i < Acc::kRowTiles; ++i) {
        if constexpr (kSeparate) {
          multiply_split(acc.c[i][j], small_terms.c[i][j], a[i], b[0], b[1]);
          multiply_split(acc.c[i][j + 1], small_terms.c[i][j + 1], a[i], b[2], b[3]);
        } else {
          multiply_step<Element, kSums>(acc.c[i][j], a[i], b[0], b[1]);
          multiply_step<Element, kSums>(acc.c[i][j + 1], a[i], b[2], b[3]);
        }
      }
    }
  }
  if constexpr (kSeparate) acc.add(small_terms);
}

// acc += S or dP, summed over the head dim: Q rows . K^T, dO rows . V^T, or their transposes. All kernels sum S in the
// same way: then an error in S cancels where P = exp(S - LSE) is recomputed with the same error. delta is subtracted
// from dP, and no tensor core has truncated the sums in delta: dP - delta has the error of the truncation, and sums of
// dS accumulate it.
template <class Acc, class LeftTile, class RightTile>
__device__ __forceinline__ void multiply_head_dims(Acc& acc, const LeftTile& left, int first_row,
                                                   const RightTile& right) {
  constexpr int kHeadDim = LeftTile::kColumns;
  multiply_rows<LeftTile, kHeadDim <= 128 ? Sums::kSeparate : Sums::kRounded>(acc, left, first_row, right);
}

// multiply_registers for float32, with one addition outside the tensor core for all columns of left: a sum over many
// tiles is rounded once per tile, and truncated only within it.
template <class Acc, class LeftAcc, class RightTile>
__device__ __forceinline__ void multiply_registers_rounded(Acc& acc, const LeftAcc& left, const RightTile& right,
                                                           int first_column) {
  using Element = typename RightTile::Element;
  constexpr int kSteps = 8 * LeftAcc::kColumnTiles / kInner<Element>;
  using Sum = Accumulator<Acc::kRowTiles, 2>;  // of two column tiles at a time
  const RightOperandColumns<RightTile> right_operand(right, first_column);
  uint32_t a[kSteps][Acc::kRowTiles][4];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
#pragma unroll
    for (int i = 0; i < Acc::kRowTiles; ++i) to_operand<Element>(a[k][i], left, i, k);
  }
#pragma unroll
  for (int j = 0; j < Acc::kColumnTiles; j += 2) {
    Sum sum;
    sum.clear();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t b[4];
      right_operand.load(b, kInner<Element> * k, 8 * j);
#pragma unroll
      for (int i = 0; i < Acc::kRowTiles; ++i) {
        multiply_step<Element>(sum.c[i][0], a[k][i], b[0], b[1]);
        multiply_step<Element>(sum.c[i][1], a[k][i], b[2], b[3]);
      }
    }
#pragma unroll
    for (int r = 0; r < Sum::kThreadRows; ++r) {
#pragma unroll
      for (int e = 0; e < 4; ++e) acc.at(r, j + e / 2, e % 2) += sum.at(r, e / 2, e % 2);
    }
  }
}

// acc += left . right columns [first_column, ...). left is an accumulator in registers, rounded to Element, and its
// columns are the rows of right. first_column: a multiple of the tile's kGroup.
template <class Acc, class LeftAcc, class RightTile>
__device__ __forceinline__ void multiply_registers(Acc& acc, const LeftAcc& left, const RightTile& right,
                                                   int first_column = 0) {
  using Element = typename RightTile::Element;
  // Larger head dims have tiles of at most two steps.
  constexpr bool kOncePerTile = std::is_same_v<Element, float> && RightTile::kColumns <= 128;
  if constexpr (kOncePerTile) {
    multiply_registers_rounded(acc, left, right, first_column);
    return;
  }
  const RightOperandColumns<RightTile> right_operand(right, first_column);
#pragma unroll
  for (int k = 0; k < 8 * LeftAcc::kColumnTiles / kInner<Element>; ++k) {
    uint32_t a[Acc::kRowTiles][4];
#pragma unroll
    for (int i = 0; i < Acc::kRowTiles; ++i) to_operand<Element>(a[i], left, i, k);
#pragma unroll
    for (int j = 0; j < Acc::kColumnTiles; j += 2) {
      uint32_t b[4];
      right_operand.load(b, kInner<Element> * k, 8 * j);
#pragma unroll
      for (int i = 0; i < Acc::kRowTiles; ++i) {
        multiply_step<Element, Sums::kRounded>(acc.c[i][j], a[i], b[0], b[1]);
        multiply_step<Element, Sums::kRounded>(acc.c[i][j + 1], a[i], b[2], b[3]);
      }
    }
  }
}

}  // namespace flash_attn_ext::tile
