// Sums of P's rows as P was rounded, which divide O: made by tensor cores along with O += P V, or by additions. Both
// have the same functions, so that what uses them need not know which they are.
#pragma once

#include "tile/sm90/gemm.h"

namespace flash_attn_ext::tile {

// P times the ones behind V (BoxTileWithOnes).
struct RowSums {
  float c[1][4];
  float flushed[2];  // sums of a thread's rows that are in c no more

  __device__ __forceinline__ void clear() { flushed[0] = flushed[1] = 0.0f; }
  __device__ __forceinline__ float at(int r) const { return flushed[r] + c[0][2 * r]; }
  __device__ __forceinline__ void scale_row(int r, float factor) {
    c[0][2 * r] *= factor;
    flushed[r] *= factor;
  }

  // A product cuts off what each of its terms has below the last bits of the sum: in a long one, of terms of one sign,
  // that adds up. No product is in flight.
  __device__ __forceinline__ void flush() {
#pragma unroll
    for (int r = 0; r < 2; ++r) flushed[r] += c[0][2 * r];
#pragma unroll
    for (int e = 0; e < 4; ++e) c[0][e] = 0.0f;
  }

  __device__ __forceinline__ void pin() { ptx::pin_registers(c); }
  template <class Left, class Element>
  __device__ __forceinline__ void add(const Left&, Element) {}  // the product does
};

// Where one product does not hold V and the ones.
struct AddedRowSums {
  float own[2];  // of a thread's columns

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

// sums = left . right, plus what sums holds where `accumulate`; likewise the sums of left's rows.
template <class Right>
__device__ __forceinline__ void start_product(WarpgroupAccumulator<Right::kColumns>& sums, RowSums& row_sums,
                                              const PackedRows<Right::kRows>& left, const BoxOperand<Right>& right,
                                              bool accumulate) {
  using Element = typename Right::Element;
  ptx::pin_registers(sums.c[0]);
  ptx::pin_registers(row_sums.c);
  ptx::fence_products();
#pragma unroll
  for (int step = 0; step < PackedRows<Right::kRows>::kSteps; ++step) {
    const bool adds = step > 0 || accumulate;
    if constexpr (Right::kColumns == 256) {  // as wide as a product can be
      ptx::multiply_async(reinterpret_cast<float(&)[16][4]>(sums.c[0][0]), left.a[step], right.rows(step), adds,
                          Element{});
      ptx::multiply_async(reinterpret_cast<float(&)[16][4]>(sums.c[0][16]), row_sums.c, left.a[step],
                          right.rows(step, 2), adds, Element{});
    } else {
      ptx::multiply_async(sums.c[0], row_sums.c, left.a[step], right.rows(step), adds, Element{});
    }
  }
  ptx::commit_products();
}

template <class Right>
__device__ __forceinline__ void start_product(WarpgroupAccumulator<Right::kColumns>& sums, AddedRowSums&,
                                              const PackedRows<Right::kRows>& left, const BoxOperand<Right>& right,
                                              bool accumulate) {
  start_product(sums, left, right, accumulate);
}

}  // namespace flash_attn_ext::tile
