// Row sums of the rounded P, which O is divided by. RowSums come from the wgmma of O += P V, AddedRowSums from
// additions. Both have the same interface.
#pragma once

#include "tile/sm90/gemm.h"

namespace flash_attn_ext::tile {

// Row sums as products of P with the columns of ones that follow V (SmemTileWithOnes).
struct RowSums {
  float c[1][4];
  float flushed[2];  // sums of a thread's rows that were flushed out of c

  __device__ __forceinline__ void clear() { flushed[0] = flushed[1] = 0.0f; }
  __device__ __forceinline__ float at(int r) const { return flushed[r] + c[0][2 * r]; }
  __device__ __forceinline__ void scale_row(int r, float factor) {
    c[0][2 * r] *= factor;
    flushed[r] *= factor;
  }

  // Flushes the sums. A tensor core truncates each addend to the last bits of the sum, and over a long sum of positive
  // addends that error grows. No GEMM may be in flight.
  __device__ __forceinline__ void flush() {
#pragma unroll
    for (int r = 0; r < 2; ++r) flushed[r] += c[0][2 * r];
#pragma unroll
    for (int e = 0; e < 4; ++e) c[0][e] = 0.0f;
  }

  __device__ __forceinline__ void pin() { ptx::pin_registers(c); }
  template <class Left, class Element>
  __device__ __forceinline__ void add(const Left&, Element) {}  // the wgmma adds them
};

// Row sums by additions, where one wgmma does not hold V and the ones.
struct AddedRowSums {
  float own[2];  // over a thread's columns

  __device__ __forceinline__ void clear() { own[0] = own[1] = 0.0f; }
  __device__ __forceinline__ float at(int r) const { return quad_sum(own[r]); }
  __device__ __forceinline__ void scale_row(int r, float factor) { own[r] *= factor; }
  __device__ __forceinline__ void flush() {}
  __device__ __forceinline__ void pin() {}

  template <int kInnerColumns, class Element>
  __device__ __forceinline__ void add(const PackedRows<kInnerColumns>& left, Element) {
    float sums[2][2] = {};
#pragma unroll
    for (int step = 0; step < PackedRows<kInnerColumns>::kSteps; ++step) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const uint32_t pair = left.a[step][e];
        sums[e % 2][0] += ptx::to_float(static_cast<uint16_t>(pair & 0xFFFFu), Element{});
        sums[e % 2][1] += ptx::to_float(static_cast<uint16_t>(pair >> 16), Element{});
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) own[r] += sums[r][0] + sums[r][1];
  }
};

// sums = left . right, added to sums where `accumulate`; and in the same way the sums of left's rows.
template <class Right>
__device__ __forceinline__ void issue_gemm(WarpgroupAccumulator<Right::kColumns>& sums, RowSums& row_sums,
                                           const PackedRows<Right::kRows>& left, const SmemOperand<Right>& right,
                                           bool accumulate) {
  using Element = typename Right::Element;
  ptx::pin_registers(sums.c[0]);
  ptx::pin_registers(row_sums.c);
  ptx::fence_wgmma();
#pragma unroll
  for (int step = 0; step < PackedRows<Right::kRows>::kSteps; ++step) {
    const bool adds = step > 0 || accumulate;
    if constexpr (Right::kColumns == 256) {  // the widest wgmma
      ptx::multiply_async(reinterpret_cast<float(&)[16][4]>(sums.c[0][0]), left.a[step], right.rows(step), adds,
                          Element{});
      ptx::multiply_async(reinterpret_cast<float(&)[16][4]>(sums.c[0][16]), row_sums.c, left.a[step],
                          right.rows(step, 2), adds, Element{});
    } else {
      ptx::multiply_async(sums.c[0], row_sums.c, left.a[step], right.rows(step), adds, Element{});
    }
  }
  ptx::commit_wgmma();
}

template <class Right>
__device__ __forceinline__ void issue_gemm(WarpgroupAccumulator<Right::kColumns>& sums, AddedRowSums&,
                                           const PackedRows<Right::kRows>& left, const SmemOperand<Right>& right,
                                           bool accumulate) {
  issue_gemm(sums, left, right, accumulate);
}

}  // namespace flash_attn_ext::tile
