// The GEMM of one warp on two shared tiles whose rows are both inner indices: left^T . right.
#pragma once

#include "ptx/ldmatrix.h"
#include "ptx/shared_memory.h"
#include "tile/accumulator.h"
#include "tile/shared_tile.h"
#include "tile/sm80/operand.h"
#include "tile/sm80/step.h"

namespace flash_attn_ext::tile {

// A left operand whose tile's columns are result rows: ldmatrix transposes its blocks. As in RightOperandColumns, and
// in the same order of inner indices, 32-bit elements are read one by one. The 32 elements of a warp lie in different
// banks, since the swizzle gives different chunks to 4 even rows, and to 4 odd ones.
template <class Tile>
struct LeftOperandColumns {
  using Element = typename Tile::Element;
  LaneAddress<Tile> first;
  LaneAddress<Tile> second;

  // first_row: of the result; a multiple of the tile's swizzle group.
  __device__ __forceinline__ LeftOperandColumns(const Tile& tile, int first_row)
      : first(sizeof(Element) == 2
                  ? LaneAddress<Tile>{tile, lane() % 8 + lane() / 16 * 8, first_row + lane() / 8 % 2 * 8}
                  : LaneAddress<Tile>{tile, 2 * (lane() % 4), first_row + lane() / 4}),
        second(tile, 2 * (lane() % 4) + 1, first_row + lane() / 4) {}

  __device__ __forceinline__ void load(uint32_t (&a)[4], int row, int k) const {
    if constexpr (sizeof(Element) == 2) {
      ptx::load_matrix_x4_transposed(a, first.at(k, row));
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        a[half] = ptx::load_shared(first.at(k, row + 8 * half));
        a[2 + half] = ptx::load_shared(second.at(k, row + 8 * half));
      }
    }
  }
};

// One warp's result: 16 kRowTiles rows, and the columns of one of kColumnWarps warps that share a right tile. A warp
// has an equal part of each of the tile's swizzle groups, so that every head dim divides evenly, and an exclusive or
// still leads from one of its blocks to the next.
template <class RightTile, int kRowTiles, int kColumnWarps>
struct SharedColumns {
  static constexpr int kWidth = RightTile::kGroup / kColumnWarps;
  static constexpr int kGroups = RightTile::kColumns / RightTile::kGroup;
  static_assert(kWidth % 16 == 0);
  using Part = Accumulator<kRowTiles, kWidth / 8>;

  Part parts[kGroups];

  // The tile's column at which a part begins.
  __device__ static int first_column(int group, int warp_column) {
    return group * RightTile::kGroup + warp_column * kWidth;
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (Part& part : parts) part.clear();
  }
  __device__ __forceinline__ bool has_nan() const {
    bool found = false;
    for_each([&](float x) { found |= isnan(x); });
    return found;
  }
  __device__ __forceinline__ bool only_nan() const {
    bool found = true;
    for_each([&](float x) { found &= isnan(x); });
    return found;
  }

 private:
  template <class Function>
  __device__ __forceinline__ void for_each(Function&& function) const {
#pragma unroll
    for (const Part& part : parts) {
#pragma unroll
      for (int r = 0; r < Part::kThreadRows; ++r) {
#pragma unroll
        for (int j = 0; j < Part::kColumnTiles; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) function(part.at(r, j, e));
        }
      }
    }
  }
};

// acc += left^T . right for result rows [first_row, ...) and the columns of warp_column. float32 sums are rounded in
// each step, since they are as long as a sequence.
template <class Acc, class LeftTile, class RightTile>
__device__ __forceinline__ void multiply_transposed(Acc& acc, const LeftTile& left, int first_row,
                                                    const RightTile& right, int warp_column) {
  using Element = typename LeftTile::Element;
  using Part = typename Acc::Part;
  const LeftOperandColumns<LeftTile> left_operand(left, first_row);
  const RightOperandColumns<RightTile> right_operand(right, Acc::first_column(0, warp_column));
  // The parts of two steps' float32 operands do not fit registers beside 128 sums.
  constexpr bool kOneStep = sizeof(Element) == 4 && RightTile::kColumns > 64;
  constexpr int kUnrolled = kOneStep ? 1 : LeftTile::kRows / kInner<Element>;
#pragma unroll kUnrolled
  for (int k = 0; k < LeftTile::kRows; k += kInner<Element>) {
    uint32_t a[Part::kRowTiles][4];
#pragma unroll
    for (int i = 0; i < Part::kRowTiles; ++i) left_operand.load(a[i], 16 * i, k);
#pragma unroll
    for (int group = 0; group < Acc::kGroups; ++group) {
#pragma unroll
      for (int j = 0; j < Part::kColumnTiles; j += 2) {
        uint32_t b[4];
        right_operand.load(b, k, group * RightTile::kGroup + 8 * j);
#pragma unroll
        for (int i = 0; i < Part::kRowTiles; ++i) {
          multiply_step<Element, Sums::kRounded>(acc.parts[group].c[i][j], a[i], b[0], b[1]);
          multiply_step<Element, Sums::kRounded>(acc.parts[group].c[i][j + 1], a[i], b[2], b[3]);
        }
      }
    }
  }
}

// The same where a zero on the left makes a product zero whatever is on the right, even NaN or infinity. It is slow.
template <class Acc, class LeftTile, class RightTile>
__device__ __forceinline__ void multiply_transposed_isolated(Acc& acc, const LeftTile& left, int first_row,
                                                             const RightTile& right, int warp_column) {
  using Part = typename Acc::Part;
#pragma unroll 1
  for (int inner = 0; inner < LeftTile::kRows; ++inner) {
#pragma unroll
    for (int group = 0; group < Acc::kGroups; ++group) {
      float b[Part::kColumnTiles][2];
#pragma unroll
      for (int j = 0; j < Part::kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = Acc::first_column(group, warp_column) + Part::column(j, e);
          b[j][e] = static_cast<float>(right.at(inner, column));
        }
      }
#pragma unroll
      for (int r = 0; r < Part::kThreadRows; ++r) {
        const float a = static_cast<float>(left.at(inner, first_row + Part::row(r)));
        if (a == 0.0f) continue;
#pragma unroll
        for (int j = 0; j < Part::kColumnTiles; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) acc.parts[group].at(r, j, e) += a * b[j][e];
        }
      }
    }
  }
}

}  // namespace flash_attn_ext::tile
