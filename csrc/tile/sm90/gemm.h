// GEMMs of a warpgroup's 64 rows with tiles in shared memory. Each function issues a group of wgmma and returns while
// it is in flight; ptx::wait_wgmma waits for it.
#pragma once

#include "ptx/wgmma.h"
#include "tile/accumulator.h"
#include "tile/sm90/augmented_columns.h"
#include "tile/sm90/smem_tile.h"

namespace flash_attn_ext::tile {

inline constexpr int kWarpgroupSize = 128;
inline constexpr int kWarpgroupRows = 64;

// The accumulator of a warp's 16 of the 64 rows. Its fragment map is that of mma.sync.
template <int kColumns>
using WarpgroupAccumulator = Accumulator<1, kColumns / 8>;

// 64 rows in the element type, as the left operand in registers of GEMMs over kInnerColumns columns.
template <int kInnerColumns>
struct PackedRows {
  static constexpr int kSteps = kInnerColumns / 16;

  uint32_t a[kSteps][4];

  // Columns past the end of the rows are zero-padded.
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

// sums = left . right^T. The accumulators keep their registers. augmented: the augmented columns, if there are any.
template <class Left, class Right, class Augmented = NoAugmentedStep>
__device__ __forceinline__ void issue_gemm(WarpgroupAccumulator<Right::kRows>& sums, const SmemOperand<Left>& left,
                                           const SmemOperand<Right>& right, const Augmented& augmented = {}) {
  static_assert(Left::kColumns == Right::kColumns && Left::kRows == kWarpgroupRows);
  ptx::pin_registers(sums.c[0]);
  ptx::fence_wgmma();
#pragma unroll
  for (int step = 0; step < Left::kColumns / 16; ++step) {
    ptx::multiply_async(sums.c[0], left.columns(step), right.columns(step), step > 0, typename Left::Element{});
  }
  augmented.add_to(sums.c[0]);
  ptx::commit_wgmma();
}

// The same, where sums occupies no registers before the GEMM. left may be 64 rows of a larger tile: left.from_row().
template <class Left, class Right, class Augmented = NoAugmentedStep>
__device__ __forceinline__ void issue_rows_gemm(WarpgroupAccumulator<Right::kRows>& sums, const SmemOperand<Left>& left,
                                                const SmemOperand<Right>& right, const Augmented& augmented = {}) {
  static_assert(Left::kColumns == Right::kColumns);
  ptx::renew_registers(sums.c[0]);
  ptx::fence_wgmma();
#pragma unroll
  for (int step = 0; step < Left::kColumns / 16; ++step) {
    ptx::multiply_async(sums.c[0], left.columns(step), right.columns(step), step > 0, typename Left::Element{});
  }
  augmented.add_to(sums.c[0]);
  ptx::commit_wgmma();
}

// The same with left in registers.
template <class Right, class Augmented = NoAugmentedStep>
__device__ __forceinline__ void issue_rows_gemm(WarpgroupAccumulator<Right::kRows>& sums,
                                                const PackedRows<Right::kColumns>& left,
                                                const SmemOperand<Right>& right, const Augmented& augmented = {}) {
  ptx::renew_registers(sums.c[0]);
  ptx::fence_wgmma();
#pragma unroll
  for (int step = 0; step < Right::kColumns / 16; ++step) {
    ptx::multiply_rows_async(sums.c[0], left.a[step], right.columns(step), step > 0, typename Right::Element{});
  }
  augmented.add_to(sums.c[0]);
  ptx::commit_wgmma();
}

// The same for up to 256 rows of right, with two wgmma from 128 rows on: ptxas gives one instruction no more registers
// than a thread has when the kernel starts.
template <class Left, class Right, class Augmented = NoAugmentedStep>
__device__ __forceinline__ void issue_wide_gemm(WarpgroupAccumulator<Right::kRows>& sums, const SmemOperand<Left>& left,
                                                const SmemOperand<Right>& right, const Augmented& augmented = {}) {
  static_assert(Left::kColumns == Right::kColumns && Left::kRows == kWarpgroupRows);
  constexpr int kFirst = Right::kRows <= 128 ? Right::kRows : (Right::kRows / 2 + 15) / 16 * 16;
  constexpr int kSecond = Right::kRows - kFirst;
  auto& first = reinterpret_cast<float(&)[kFirst / 8][4]>(sums.c[0][0]);
  ptx::renew_registers(sums.c[0]);
  ptx::fence_wgmma();
#pragma unroll
  for (int step = 0; step < Left::kColumns / 16; ++step) {
    ptx::multiply_async(first, left.columns(step), right.columns(step), step > 0, typename Left::Element{});
  }
  augmented.add_to(first);
  if constexpr (kSecond > 0) {
    auto& second = reinterpret_cast<float(&)[kSecond / 8][4]>(sums.c[0][kFirst / 8]);
#pragma unroll
    for (int step = 0; step < Left::kColumns / 16; ++step) {
      ptx::multiply_async(second, left.columns(step), right.from_row(kFirst).columns(step), step > 0,
                          typename Left::Element{});
    }
    augmented.add_to(second, kFirst);
  }
  ptx::commit_wgmma();
}

// sums = left . right, for as many columns of right, from a chunk on, as sums has.
template <int kColumns, class Left, class Right>
__device__ __forceinline__ void issue_columns_gemm(WarpgroupAccumulator<kColumns>& sums, const SmemOperand<Left>& left,
                                                   const SmemOperand<Right>& right, int chunk) {
  static_assert(Left::kColumns == Right::kRows && Left::kRows == kWarpgroupRows);
  ptx::renew_registers(sums.c[0]);
  ptx::fence_wgmma();
#pragma unroll
  for (int step = 0; step < Right::kRows / 16; ++step) {
    ptx::multiply_by_rows_async(sums.c[0], left.columns(step), right.rows(step, chunk), step > 0,
                                typename Left::Element{});
  }
  ptx::commit_wgmma();
}

// sums += left . right. left may be 64 rows of a larger tile: left.from_row().
template <class Left, class Right>
__device__ __forceinline__ void add_gemm(WarpgroupAccumulator<Right::kColumns>& sums, const SmemOperand<Left>& left,
                                         const SmemOperand<Right>& right) {
  static_assert(Left::kColumns == Right::kRows);
  ptx::pin_registers(sums.c[0]);
  ptx::fence_wgmma();
#pragma unroll
  for (int step = 0; step < Right::kRows / 16; ++step) {
    ptx::multiply_by_rows_async(sums.c[0], left.columns(step), right.rows(step), true, typename Left::Element{});
  }
  ptx::commit_wgmma();
}

// sums = left^T . right.
template <class Left, class Right>
__device__ __forceinline__ void issue_transposed_gemm(WarpgroupAccumulator<Right::kColumns>& sums,
                                                      const SmemOperand<Left>& left, const SmemOperand<Right>& right) {
  static_assert(Left::kRows == Right::kRows && Left::kColumns == kWarpgroupRows);
  ptx::renew_registers(sums.c[0]);
  ptx::fence_wgmma();
#pragma unroll
  for (int step = 0; step < Left::kRows / 16; ++step) {
    ptx::multiply_transposed_async(sums.c[0], left.rows(step), right.rows(step), step > 0, typename Left::Element{});
  }
  ptx::commit_wgmma();
}

// sums += left^T . right. 256 columns take two wgmma: ptxas gives one instruction no more registers than a thread has
// when the kernel starts, which may be as few as 128. kColumns: how many columns of right are multiplied, from the
// first one on: all, or half of 256.
template <int kColumns, class Left, class Right>
__device__ __forceinline__ void add_transposed_gemm(WarpgroupAccumulator<Right::kColumns>& sums,
                                                    const SmemOperand<Left>& left, const SmemOperand<Right>& right) {
  static_assert(Left::kRows == Right::kRows && Left::kColumns == kWarpgroupRows);
  static_assert(kColumns == Right::kColumns || (kColumns == 128 && Right::kColumns == 256));
  constexpr int kInstructions = kColumns == 256 ? 2 : 1;
  constexpr int kTiles = kColumns / 8 / kInstructions;
  ptx::pin_registers(sums.c[0]);
  ptx::fence_wgmma();
#pragma unroll
  for (int step = 0; step < Left::kRows / 16; ++step) {
#pragma unroll
    for (int part = 0; part < kInstructions; ++part) {
      ptx::multiply_transposed_async(reinterpret_cast<float(&)[kTiles][4]>(sums.c[0][part * kTiles]), left.rows(step),
                                     right.rows(step, part * kTiles / 8), true, typename Left::Element{});
    }
  }
  ptx::commit_wgmma();
}

// sums = left . right, added to sums where `accumulate`.
template <class Right>
__device__ __forceinline__ void issue_gemm(WarpgroupAccumulator<Right::kColumns>& sums,
                                           const PackedRows<Right::kRows>& left, const SmemOperand<Right>& right,
                                           bool accumulate) {
  ptx::pin_registers(sums.c[0]);
  ptx::fence_wgmma();
#pragma unroll
  for (int step = 0; step < PackedRows<Right::kRows>::kSteps; ++step) {
    ptx::multiply_async(sums.c[0], left.a[step], right.rows(step), step > 0 || accumulate, typename Right::Element{});
  }
  ptx::commit_wgmma();
}

}  // namespace flash_attn_ext::tile
