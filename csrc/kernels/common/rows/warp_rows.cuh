// Products and sums of matrix rows by one warp, without tensor cores, for 32 rows at a time:
//   multiply_rows: product[i] = fixed . row[i],       lane i receives product[i]
//   add_rows:      sums      += weight[i] * row[i],   lane i passes weight[i], and every lane keeps some columns
// Lanes stride over columns, so that loads coalesce. Only rows that are chosen, or whose weight is not 0, are read, so
// NaN in the others reaches nothing. Every sum has one order.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "tile/accumulator.h"
#include "tile/element.h"

namespace flash_attn_ext::common {

using tile::kWarpSize;

inline constexpr unsigned kAllLanes = 0xFFFFFFFFu;
// So many rows have loads in flight together. More would take registers that the sums need.
template <class Real>
inline constexpr int kRowsAtOnce = 16 / sizeof(Real);

template <class Real>
__device__ __forceinline__ Real sum_over_warp(Real value) {
  return tile::sum_over_lanes<kWarpSize>(value);
}

// Ignores NaN.
template <class Real>
__device__ __forceinline__ Real maximum_over_warp(Real value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value = fmax(value, __shfl_xor_sync(kAllLanes, value, offset));
  }
  return value;
}

// Lane i receives the sum over the warp of values[i % kCount]. Lanes share the work: each step halves the number of
// values per lane, so this takes little more than the shuffles of one sum.
template <class Real, int kCount>
__device__ __forceinline__ Real sum_each_over_warp(Real (&values)[kCount]) {
#pragma unroll
  for (int offset = 1; offset < kCount; offset *= 2) {
    const bool odd = (tile::lane() & offset) != 0;
#pragma unroll
    for (int i = 0; i < kCount / (2 * offset); ++i) {
      const Real own = odd ? values[2 * i + 1] : values[2 * i];
      const Real given = odd ? values[2 * i] : values[2 * i + 1];
      values[i] = own + __shfl_xor_sync(kAllLanes, given, offset);
    }
  }
#pragma unroll
  for (int offset = kCount; offset < kWarpSize; offset *= 2) {
    values[0] += __shfl_xor_sync(kAllLanes, values[0], offset);
  }
  return values[0];
}

// Columns [begin, end) of a result's row, as far as it has them.
struct ColumnSlice {
  int begin;
  int end;
  __device__ __forceinline__ int count(int64_t columns) const {
    return max((columns < end ? static_cast<int>(columns) : end) - begin, 0);
  }
};

// Rows of a tensor, from one of them on.
template <class ElementType>
struct Rows {
  using Element = ElementType;
  const Element* data;
  int64_t row_stride;
  int64_t column_stride;
  int columns;

  __device__ __forceinline__ const Element* at(int row, int column) const {
    return data + row * row_stride + column * column_stride;
  }
  __device__ __forceinline__ Rows slice(const ColumnSlice& slice) const {
    return {data + slice.begin * column_stride, row_stride, column_stride, slice.count(columns)};
  }
};

struct RowPlace {
  int64_t batch;
  int64_t head;
  int64_t row;  // in the tensor, so that it counts over all sequences of a packed batch
};

template <class Element>
__device__ __forceinline__ Rows<Element> rows_from(const attention::MatrixView& view, const RowPlace& place,
                                                   int64_t columns) {
  return {view.row<const Element>(place.batch, place.head, place.row), view.row_stride, view.column_stride,
          static_cast<int>(columns)};
}

// Lane i receives the product of the one row `fixed` and rows[i], or 0 where bit i of `chosen` is not set.
template <class Element, class StreamedRows>
__device__ __forceinline__ tile::Accumulate<Element> multiply_rows(const Rows<Element>& fixed, const StreamedRows& rows,
                                                                   unsigned chosen) {
  using Real = tile::Accumulate<Element>;
  constexpr int kCount = kRowsAtOnce<Real>;
  Real product = Real(0);
#pragma unroll 1
  for (int first = 0; first < kWarpSize; first += kCount) {
    const unsigned group = chosen >> first & ((1u << kCount) - 1u);
    if (group == 0) continue;
    Real sums[kCount] = {};
#pragma unroll 1
    for (int column = tile::lane(); column < fixed.columns; column += kWarpSize) {
      const Real x = static_cast<Real>(*fixed.at(0, column));
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        if (group >> n & 1u) sums[n] += x * static_cast<Real>(*rows.at(first + n, column));
      }
    }
    const Real sum = sum_each_over_warp(sums);
    if (tile::lane() / kCount == first / kCount) product = sum;
  }
  return product;
}

// A row of sums over the warp: lane i has columns i, i + 32, ...
template <class Real>
struct ColumnSums {
  static constexpr int kSlots = 32 / sizeof(Real);
  // Wider rows are computed in slices, since more sums would not fit registers.
  static constexpr int kColumns = kSlots * kWarpSize;

  Real sums[kSlots];

  __device__ __forceinline__ static int column(int slot) { return slot * kWarpSize + tile::lane(); }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (Real& sum : sums) sum = Real(0);
  }
  __device__ __forceinline__ void multiply(Real factor) {
#pragma unroll
    for (Real& sum : sums) sum *= factor;
  }

  // Whether each of the first `columns` columns is NaN, so that adding cannot change them. The answer is the same in
  // every lane.
  __device__ __forceinline__ bool all_nan(int columns) const {
    bool nan = true;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) nan = nan && (column(slot) >= columns || sums[slot] != sums[slot]);
    return __all_sync(kAllLanes, nan);
  }
  // Columns that do not exist are 0.
  __device__ __forceinline__ bool all_finite() const {
    bool finite = true;
#pragma unroll
    for (Real sum : sums) finite = finite && sum - sum == Real(0);
    return __all_sync(kAllLanes, finite);
  }

  template <class Element>
  __device__ __forceinline__ void store(Element* target, int64_t stride, int columns) const {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      if (column(slot) < columns) target[column(slot) * stride] = Element(sums[slot]);
    }
  }
};

// sums += weight[i] * rows[i]. `rows` has at most ColumnSums::kColumns columns.
template <class StreamedRows, class Real>
__device__ __forceinline__ void add_rows(ColumnSums<Real>& sums, const StreamedRows& rows, Real weight) {
  using Element = typename StreamedRows::Element;
  constexpr int kCount = kRowsAtOnce<Real>;
  const unsigned chosen = __ballot_sync(kAllLanes, weight != Real(0));
#pragma unroll 1
  for (int first = 0; first < kWarpSize; first += kCount) {
    const unsigned group = chosen >> first & ((1u << kCount) - 1u);
    if (group == 0) continue;
    Real weights[kCount];
#pragma unroll
    for (int n = 0; n < kCount; ++n) weights[n] = __shfl_sync(kAllLanes, weight, first + n);
    // The address is advanced, not recomputed, because the compiler would otherwise keep the offsets of all slots in
    // registers for the whole loop.
    const Element* source = rows.at(first, tile::lane());
#pragma unroll
    for (int slot = 0; slot < ColumnSums<Real>::kSlots; ++slot) {
      if (ColumnSums<Real>::column(slot) >= rows.columns) break;
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        if (group >> n & 1u) sums.sums[slot] += weights[n] * static_cast<Real>(source[n * rows.row_stride]);
      }
      source += kWarpSize * rows.column_stride;
    }
  }
}

}  // namespace flash_attn_ext::common
