// 32 rows of K or V for a warp, those of keys [first, first + 32): in the tensors themselves, or in a cache.
#pragma once

#include "kernels/common/rows/warp_rows.cuh"

namespace flash_attn_ext::common {

// The sequence and the head that the rows belong to.
struct KeyHead {
  const attention::Sequence& sequence;
  int64_t head;
};

struct OwnKeys {
  // Where a loop over keys [begin, ...) starts.
  __device__ __forceinline__ static int64_t first(int64_t begin) { return begin; }

  template <class Element>
  __device__ __forceinline__ static Rows<Element> rows(const attention::MatrixView& view,
                                                       const attention::AttentionParams&, const KeyHead& of,
                                                       int64_t first, int columns) {
    return rows_from<Element>(view, {of.sequence.batch, of.head, of.sequence.key_begin + first}, columns);
  }
};

// The same beside a bias that is broadcast along queries. attention::subtracted_key_bias of a row's own keys is
// subtracted before it is added to q.k. Where the backward pass computes a query's gradients from sums without that
// (attention::KeyBiasMaxima), nothing is.
struct OwnKeysWithBias : OwnKeys {};

// Rows whose addresses are found one by one. The rows of a group of kRowsAtOnce are consecutive.
template <class ElementType>
struct FoundRows {
  using Element = ElementType;
  const attention::MatrixView& view;
  const attention::AttentionParams& p;
  const KeyHead of;
  int64_t first;
  int first_column;
  int columns;
  int64_t row_stride;
  int64_t column_stride;

  __device__ __forceinline__ const Element* at(int row, int column) const {
    const attention::KeyRow key = p.key_row(of.sequence, first + row);
    return view.row<const Element>(key.entry, of.head, key.row) + (first_column + column) * column_stride;
  }
  __device__ __forceinline__ FoundRows slice(const ColumnSlice& slice) const {
    return {view, p, of, first, first_column + slice.begin, slice.count(columns), row_stride, column_stride};
  }
};

// Rows of the tensors themselves, or of a cache.
struct AnyKeys {
  // Groups of rows begin where pages may.
  __device__ __forceinline__ static int64_t first(int64_t begin) { return begin / kWarpSize * kWarpSize; }

  template <class Element>
  __device__ __forceinline__ static FoundRows<Element> rows(const attention::MatrixView& view,
                                                            const attention::AttentionParams& p, const KeyHead& of,
                                                            int64_t first, int columns) {
    return {view, p, of, first, 0, columns, view.row_stride, view.column_stride};
  }
};

}  // namespace flash_attn_ext::common
