// Rows that a call appends to its cache, and the rotated rows of q (attention/append.h).
#pragma once

#include "attention/append.h"
#include "tile/accumulator.h"
#include "tile/element.h"

namespace flash_attn_ext::common {

// Whether the columns of a row may have a stride. Kernels that read the cache themselves accept such rows of 64-bit
// elements only (sm80_readable in host/backends.cpp).
enum class Columns { kAsKernelsRead, kAnyStride };

// The stride from one column of a row to the next.
template <class Element, Columns kColumns>
__device__ __forceinline__ int64_t column_stride(const attention::MatrixView& view) {
  return kColumns == Columns::kAnyStride || sizeof(Element) == 8 ? view.column_stride : 1;
}

// A row that may be rotated by its position.
template <class Element>
struct RotatedRow {
  using Real = tile::Accumulate<Element>;

  const Element* source;
  int64_t stride;
  const Element* cos = nullptr;  // of the position
  const Element* sin = nullptr;
  int dim = 0;  // rotated columns
  bool interleaved = false;

  __device__ __forceinline__ void rotate(const attention::Rotary& rotary, int64_t position) {
    if (!rotary.present()) return;
    cos = static_cast<const Element*>(rotary.cos) + rotary.row(position) * rotary.cos_stride;
    sin = static_cast<const Element*>(rotary.sin) + rotary.row(position) * rotary.sin_stride;
    dim = static_cast<int>(rotary.dim);
    interleaved = rotary.interleaved;
  }

  __device__ __forceinline__ Element at(int column) const {
    if (column >= dim) return source[column * stride];
    const int half = dim / 2;
    const bool is_second = interleaved ? column % 2 != 0 : column >= half;
    const int pair = interleaved ? column / 2 : column - (is_second ? half : 0);
    const int first = interleaved ? 2 * pair : pair;
    const int second = interleaved ? first + 1 : first + half;
    const attention::RotatedPair<Real> rotated =
        attention::rotate(static_cast<Real>(source[first * stride]), static_cast<Real>(source[second * stride]),
                          static_cast<Real>(cos[pair]), static_cast<Real>(sin[pair]));
    return Element(is_second ? rotated.second : rotated.first);
  }
};

template <class Element, Columns kColumns = Columns::kAsKernelsRead>
struct AppendedRows {
  using Row = RotatedRow<Element>;

  const attention::AppendParams& p;

  // New key `index` of a sequence that had `num_old` keys before, and its value.
  __device__ __forceinline__ Row key(int64_t batch, int64_t head, int64_t index, int64_t num_old) const {
    Row row = {p.k_new.row<const Element>(batch, head, index), column_stride<Element, kColumns>(p.k_new)};
    row.rotate(p.rotary, num_old + index);
    return row;
  }
  __device__ __forceinline__ Row value(int64_t batch, int64_t head, int64_t index) const {
    return {p.v_new.row<const Element>(batch, head, index), column_stride<Element, kColumns>(p.v_new)};
  }
  __device__ __forceinline__ Row query(int64_t batch, int64_t head, int64_t query, int64_t num_old) const {
    Row row = {p.q.row<const Element>(batch, head, query), column_stride<Element, kColumns>(p.q)};
    row.rotate(p.rotary, num_old + (p.rotary.queries_advance ? query : 0));
    return row;
  }

  // Indices of the rows in memory: first those of k_new, then of v_new, then of q where it is rotated.
  FLASH_HOST_DEVICE int64_t num_new() const { return p.batch * p.cache.num_new * p.num_heads_k; }
  FLASH_HOST_DEVICE int64_t count() const {
    return 2 * num_new() + (p.rotary.present() ? p.batch * p.num_queries * p.num_heads_q : 0);
  }

  // Called by a warp.
  __device__ __forceinline__ void copy(int64_t index) const {
    if (index < 2 * num_new()) {
      const bool is_key = index < num_new();
      append(is_key ? index : index - num_new(), is_key);
    } else {
      copy_query(index - 2 * num_new());
    }
  }

 private:
  // index: of (batch, new key, head).
  __device__ __forceinline__ void append(int64_t index, bool is_key) const {
    const int64_t head = index % p.num_heads_k;
    const int64_t new_key = index / p.num_heads_k % p.cache.num_new;
    const int64_t batch = index / p.num_heads_k / p.cache.num_new;
    const int64_t num_old = p.cache.num_old(batch, p.capacity);
    if (num_old + new_key >= p.capacity) return;
    const attention::KeyRow at = p.cache.row(batch, num_old + new_key);
    const attention::MatrixView& to = is_key ? p.k : p.v;
    write(is_key ? key(batch, head, new_key, num_old) : value(batch, head, new_key),
          to.row<Element>(at.entry, head, at.row), column_stride<Element, kColumns>(to),
          is_key ? p.head_dim_qk : p.head_dim_v);
  }

  __device__ __forceinline__ void copy_query(int64_t index) const {
    const int64_t head = index % p.num_heads_q;
    const int64_t query_index = index / p.num_heads_q % p.num_queries;
    const int64_t batch = index / p.num_heads_q / p.num_queries;
    write(query(batch, head, query_index, p.cache.num_old(batch, p.capacity)),
          p.q_rotated.row<Element>(batch, head, query_index), p.q_rotated.column_stride, p.head_dim_qk);
  }

  __device__ __forceinline__ static void write(const Row& row, Element* to, int64_t stride, int64_t columns) {
    for (int column = tile::lane(); column < columns; column += tile::kWarpSize) to[column * stride] = row.at(column);
  }
};

// Copies every step-th row from the first one on. Not inlined: a kernel's first instructions come from global memory in
// each call, and this code would lie between them.
template <class Element>
__device__ __noinline__ void copy_appended_rows(const attention::AppendParams& p, uint32_t first, uint32_t step) {
  const AppendedRows<Element> rows = {p};
  const int64_t count = rows.count();
#pragma unroll 1
  for (int64_t index = first; index < count; index += step) rows.copy(index);
}

}  // namespace flash_attn_ext::common
