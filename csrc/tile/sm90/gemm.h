// Products of a warpgroup's 64 rows with tiles in shared memory, started and left in flight: ptx::wait_products ends
// them.
#pragma once

#include "ptx/wgmma.h"
#include "tile/accumulator.h"
#include "tile/sm90/box_tile.h"
#include "tile/sm90/column_terms.h"

namespace flash_attn_ext::tile {

inline constexpr int kWarpgroupSize = 128;
inline constexpr int kWarpgroupRows = 64;

// A warp's 16 of the 64 rows. The fragment map is that of mma.sync.
template <int kColumns>
using WarpgroupAccumulator = Accumulator<1, kColumns / 8>;

// 64 rows in the element type, as the left operand of products over kInnerColumns columns.
template <int kInnerColumns>
struct PackedRows {
  static constexpr int kSteps = kInnerColumns / 16;

  uint32_t a[kSteps][4];

  // Columns that rows do not have become zeros.
  template <class Element, int kColumnTiles>
  __device__ __forceinline__ void pack(const Accumulator<1, kColumnTiles>& rows, Element) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int j = 2 * step + e / 2;
        a[step][e] = j >= kColumnTiles
                         ? 0u
                         : ptx::pack_in_order(rows.c[0][j][e % 2 * 2], rows.c[0][j][e % 2 * 2 + 1], Element{});
      }
    }
  }
};

// sums = left . right^T. sums keep their registers, whatever they held.
template <class Left, class Right>
__device__ __forceinline__ void start_product(WarpgroupAccumulator<Right::kRows>& sums, const BoxOperand<Left>& left,
                                              const BoxOperand<Right>& right) {
  static_assert(Left::kColumns == Right::kColumns && Left::kRows == kWarpgroupRows);
  ptx::pin_registers(sums.c[0]);
  ptx::fence_products();
#pragma unroll
  for (int step = 0; step < Left::kColumns / 16; ++step) {
    ptx::multiply_async(sums.c[0], left.columns(step), right.columns(step), step > 0, typename Left::Element{});
  }
  ptx::commit_products();
}

// The same, without registers for sums before it begins. left may be 64 rows of a larger tile: left.from_row(). terms:
// what is added to the columns, if anything.
template <class Left, class Right, class Terms = NoTerms>
__device__ __forceinline__ void start_rows_product(WarpgroupAccumulator<Right::kRows>& sums,
                                                   const BoxOperand<Left>& left, const BoxOperand<Right>& right,
                                                   const Terms& terms = {}) {
  static_assert(Left::kColumns == Right::kColumns);
  ptx::renew_registers(sums.c[0]);
  ptx::fence_products();
#pragma unroll
  for (int step = 0; step < Left::kColumns / 16; ++step) {
    ptx::multiply_async(sums.c[0], left.columns(step), right.columns(step), step > 0, typename Left::Element{});
  }
  terms.add_to(sums);
  ptx::commit_products();
}

// The same with left in registers.
template <class Right, class Terms = NoTerms>
__device__ __forceinline__ void start_rows_product(WarpgroupAccumulator<Right::kRows>& sums,
                                                   const PackedRows<Right::kColumns>& left,
                                                   const BoxOperand<Right>& right, const Terms& terms = {}) {
  ptx::renew_registers(sums.c[0]);
  ptx::fence_products();
#pragma unroll
  for (int step = 0; step < Right::kColumns / 16; ++step) {
    ptx::multiply_rows_async(sums.c[0], left.a[step], right.columns(step), step > 0, typename Right::Element{});
  }
  terms.add_to(sums);
  ptx::commit_products();
}

// The same for up to 256 rows of right, in two products from 128 on: ptxas gives an instruction no more registers than
// threads have when the kernel starts.
template <class Left, class Right>
__device__ __forceinline__ void start_wide_product(WarpgroupAccumulator<Right::kRows>& sums,
                                                   const BoxOperand<Left>& left, const BoxOperand<Right>& right) {
  static_assert(Left::kColumns == Right::kColumns && Left::kRows == kWarpgroupRows);
  constexpr int kFirst = Right::kRows <= 128 ? Right::kRows : (Right::kRows / 2 + 15) / 16 * 16;
  constexpr int kSecond = Right::kRows - kFirst;
  ptx::renew_registers(sums.c[0]);
  ptx::fence_products();
#pragma unroll
  for (int step = 0; step < Left::kColumns / 16; ++step) {
    ptx::multiply_async(reinterpret_cast<float(&)[kFirst / 8][4]>(sums.c[0][0]), left.columns(step),
                        right.columns(step), step > 0, typename Left::Element{});
  }
  if constexpr (kSecond > 0) {
#pragma unroll
    for (int step = 0; step < Left::kColumns / 16; ++step) {
      ptx::multiply_async(reinterpret_cast<float(&)[kSecond / 8][4]>(sums.c[0][kFirst / 8]), left.columns(step),
                          right.from_row(kFirst).columns(step), step > 0, typename Left::Element{});
    }
  }
  ptx::commit_products();
}

// sums = left . right, of as many of right's columns from a chunk on as sums has.
template <int kColumns, class Left, class Right>
__device__ __forceinline__ void start_columns_product(WarpgroupAccumulator<kColumns>& sums,
                                                      const BoxOperand<Left>& left, const BoxOperand<Right>& right,
                                                      int chunk) {
  static_assert(Left::kColumns == Right::kRows && Left::kRows == kWarpgroupRows);
  ptx::renew_registers(sums.c[0]);
  ptx::fence_products();
#pragma unroll
  for (int step = 0; step < Right::kRows / 16; ++step) {
    ptx::multiply_by_rows_async(sums.c[0], left.columns(step), right.rows(step, chunk), step > 0,
                                typename Left::Element{});
  }
  ptx::commit_products();
}

// sums += left . right. left may be 64 rows of a larger tile: left.from_row().
template <class Left, class Right>
__device__ __forceinline__ void add_product(WarpgroupAccumulator<Right::kColumns>& sums, const BoxOperand<Left>& left,
                                            const BoxOperand<Right>& right) {
  static_assert(Left::kColumns == Right::kRows);
  ptx::pin_registers(sums.c[0]);
  ptx::fence_products();
#pragma unroll
  for (int step = 0; step < Right::kRows / 16; ++step) {
    ptx::multiply_by_rows_async(sums.c[0], left.columns(step), right.rows(step), true, typename Left::Element{});
  }
  ptx::commit_products();
}

// sums = left^T . right.
template <class Left, class Right>
__device__ __forceinline__ void start_transposed_product(WarpgroupAccumulator<Right::kColumns>& sums,
                                                         const BoxOperand<Left>& left, const BoxOperand<Right>& right) {
  static_assert(Left::kRows == Right::kRows && Left::kColumns == kWarpgroupRows);
  ptx::renew_registers(sums.c[0]);
  ptx::fence_products();
#pragma unroll
  for (int step = 0; step < Left::kRows / 16; ++step) {
    ptx::multiply_transposed_async(sums.c[0], left.rows(step), right.rows(step), step > 0, typename Left::Element{});
  }
  ptx::commit_products();
}

// sums += left^T . right. 256 columns in two products: ptxas gives an instruction no more registers than threads have
// when the kernel starts, which may be as few as 128.
template <class Left, class Right>
__device__ __forceinline__ void add_transposed_product(WarpgroupAccumulator<Right::kColumns>& sums,
                                                       const BoxOperand<Left>& left, const BoxOperand<Right>& right) {
  static_assert(Left::kRows == Right::kRows && Left::kColumns == kWarpgroupRows);
  constexpr int kParts = Right::kColumns == 256 ? 2 : 1;
  constexpr int kTiles = Right::kColumns / 8 / kParts;
  ptx::pin_registers(sums.c[0]);
  ptx::fence_products();
#pragma unroll
  for (int step = 0; step < Left::kRows / 16; ++step) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      ptx::multiply_transposed_async(reinterpret_cast<float(&)[kTiles][4]>(sums.c[0][part * kTiles]), left.rows(step),
                                     right.rows(step, part * Right::kChunks / kParts), true, typename Left::Element{});
    }
  }
  ptx::commit_products();
}

// sums = left . right, plus what sums holds where `accumulate`.
template <class Right>
__device__ __forceinline__ void start_product(WarpgroupAccumulator<Right::kColumns>& sums,
                                              const PackedRows<Right::kRows>& left, const BoxOperand<Right>& right,
                                              bool accumulate) {
  ptx::pin_registers(sums.c[0]);
  ptx::fence_products();
#pragma unroll
  for (int step = 0; step < PackedRows<Right::kRows>::kSteps; ++step) {
    ptx::multiply_async(sums.c[0], left.a[step], right.rows(step), step > 0 || accumulate, typename Right::Element{});
  }
  ptx::commit_products();
}

}  // namespace flash_attn_ext::tile
