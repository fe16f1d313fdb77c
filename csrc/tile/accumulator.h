// Accumulators of a warp: kRowTiles x kColumnTiles blocks of 16 x 8, and which element a register holds.
#pragma once

#include <cstdint>

#include "tile/element.h"

namespace flash_attn_ext::tile {

inline constexpr int kWarpSize = 32;

__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }
__device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x) / kWarpSize; }

template <int kRowTilesValue, int kColumnTilesValue>
struct Accumulator {
  static constexpr int kRowTiles = kRowTilesValue;
  static constexpr int kColumnTiles = kColumnTilesValue;
  static constexpr int kThreadRows = 2 * kRowTiles;  // rows of which a thread holds elements

  float c[kRowTiles][kColumnTiles][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) c[i][j][e] = 0.0f;
      }
    }
  }

  // The fragment map (PTX ISA 9.7.14.5.8, accumulators of m16n8k16): a thread's row r (0 .. kThreadRows) and the column
  // of element e (0, 1) of column tile j. wgmma's accumulators share it.
  __device__ static int row(int r) { return row_step(r) + lane() / 4; }
  __device__ static int column(int j, int e) { return column_step(j, e) + 2 * (lane() % 4); }
  __host__ __device__ static constexpr int row_step(int r) { return 16 * (r / 2) + 8 * (r % 2); }
  __host__ __device__ static constexpr int column_step(int j, int e) { return 8 * j + e; }

  __device__ __forceinline__ float& at(int r, int j, int e) { return c[r / 2][j][2 * (r % 2) + e]; }
  __device__ __forceinline__ float at(int r, int j, int e) const { return c[r / 2][j][2 * (r % 2) + e]; }

  __device__ __forceinline__ void add(const Accumulator& other) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) c[i][j][e] += other.c[i][j][e];
      }
    }
  }

  __device__ __forceinline__ void scale(float factor) {
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) scale_row(r, factor);
  }
  __device__ __forceinline__ void scale_row(int r, float factor) {
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) at(r, j, e) *= factor;
    }
  }

  __device__ __forceinline__ bool has_nan() const {
    bool found[4] = {};  // a single one would be a chain of dependent comparisons
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
          found[2 * j % 4 + e / 2] |= c[i][j][e] != c[i][j][e] || c[i][j][e + 1] != c[i][j][e + 1];
        }
      }
    }
    return found[0] || found[1] || found[2] || found[3];
  }
};

// Columns [k * kInner, ...) of row tile i as the left operand of the next GEMM. The fragment maps of accumulators and
// operands agree for 16-bit elements. A 32-bit left operand has inner indices t and t + 4 where the accumulator holds
// columns 2 t and 2 t + 1. A GEMM does not depend on the order of its inner indices, so they are swapped here, and in
// the right operand, too.
template <class Element, class Acc>
__device__ __forceinline__ void to_operand(uint32_t (&a)[4], const Acc& acc, int i, int k) {
  if constexpr (sizeof(Element) == 2) {
    a[0] = ptx::pack(acc.c[i][2 * k][0], acc.c[i][2 * k][1], Element{});
    a[1] = ptx::pack(acc.c[i][2 * k][2], acc.c[i][2 * k][3], Element{});
    a[2] = ptx::pack(acc.c[i][2 * k + 1][0], acc.c[i][2 * k + 1][1], Element{});
    a[3] = ptx::pack(acc.c[i][2 * k + 1][2], acc.c[i][2 * k + 1][3], Element{});
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) a[e] = __float_as_uint(acc.c[i][k][e / 2 + e % 2 * 2]);
  }
}

// Two column tiles of an accumulator, packed in advance as a 16-bit left operand, which takes half as many registers.
template <int kRowTiles>
struct PackedColumns {
  static constexpr int kColumnTiles = 2;

  uint32_t a[kRowTiles][4];
};

template <class Element, int kRowTiles>
__device__ __forceinline__ void to_operand(uint32_t (&a)[4], const PackedColumns<kRowTiles>& packed, int i, int) {
#pragma unroll
  for (int e = 0; e < 4; ++e) a[e] = packed.a[i][e];
}

// The sum over groups of kLanes neighbouring lanes, in a butterfly of fixed order.
template <int kLanes, class Real>
__device__ __forceinline__ Real sum_over_lanes(Real value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, offset);
  return value;
}

// Over the four threads that share a row.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
  return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);
}

}  // namespace flash_attn_ext::tile
