// Appends new keys and values to a cache, and rotates new keys and q. Work tile: one row of a key head (a new key and
// its value) or of a query head; a work tile owns what it writes.
#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cpu/gemm/operand.h"
#include "kernels/cpu/services.h"

namespace flash_attn_ext::cpu {
namespace {

using attention::AppendParams;
using attention::KeyRow;
using attention::MatrixView;
using attention::Rotary;
using attention::RotatedPair;

// The fewest rows for a thread: fewer take less time than waking the thread.
constexpr int64_t kGrain = 64;

struct RowIndex {
  int64_t batch;
  int64_t head;
  int64_t row;
};

// A row and the stride of its elements.
template <class Element>
struct StridedRow {
  Element* data;
  int64_t stride;

  StridedRow(const MatrixView& view, const RowIndex& at)
      : data(view.row<Element>(at.batch, at.head, at.row)), stride(view.column_stride) {}
  Element& operator[](int64_t column) const { return data[column * stride]; }
};

template <class Element>
void copy_row(const StridedRow<Element>& source, const StridedRow<Element>& target,
              const attention::Interval& columns) {
  for (int64_t j = columns.begin; j < columns.end; ++j) target[j] = source[j];
}

// Rotates the first rotary.dim columns of a row by the angles of its position, and copies the others.
template <class Element>
void rotate_row(const Rotary& rotary, int64_t position, int64_t num_columns, const StridedRow<Element>& source,
                const StridedRow<Element>& target) {
  using Real = ComputeType<Element>;
  const int64_t row = rotary.row(position);
  const Element* cos = static_cast<const Element*>(rotary.cos) + row * rotary.cos_stride;
  const Element* sin = static_cast<const Element*>(rotary.sin) + row * rotary.sin_stride;
  for (int64_t pair = 0; pair < rotary.dim / 2; ++pair) {
    const int64_t first = rotary.first_column(pair);
    const int64_t second = rotary.second_column(pair);
    const RotatedPair<Real> rotated =
        attention::rotate(static_cast<Real>(source[first]), static_cast<Real>(source[second]),
                          static_cast<Real>(cos[pair]), static_cast<Real>(sin[pair]));
    target[first] = static_cast<Element>(rotated.first);
    target[second] = static_cast<Element>(rotated.second);
  }
  copy_row(source, target, {rotary.dim, num_columns});
}

// Calls function(index) for every row of `rows` rows of each head, on all threads.
template <class Function>
void for_each_row(int64_t batch, int64_t num_heads, int64_t rows, Function&& function) {
  parallel_for(batch * num_heads * rows, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t work_tile = begin; work_tile < end; ++work_tile) {
      const int64_t head_index = work_tile / rows;
      function(RowIndex{head_index / num_heads, head_index % num_heads, work_tile % rows});
    }
  });
}

template <class Element>
void append_new_keys(const AppendParams& p) {
  for_each_row(p.batch, p.num_heads_k, p.cache.num_new, [&](const RowIndex& at) {
    const int64_t key = p.cache.num_old(at.batch, p.capacity) + at.row;
    if (key >= p.capacity) return;
    const KeyRow to = p.cache.row(at.batch, key);
    const RowIndex cached = {to.entry, at.head, to.row};
    const StridedRow<Element> new_key(p.k_new, at);
    const StridedRow<Element> cached_key(p.k, cached);
    if (p.rotary.present()) {
      rotate_row(p.rotary, key, p.head_dim_qk, new_key, cached_key);
    } else {
      copy_row(new_key, cached_key, {0, p.head_dim_qk});
    }
    copy_row<Element>({p.v_new, at}, {p.v, cached}, {0, p.head_dim_v});
  });
}

template <class Element>
void rotate_queries(const AppendParams& p) {
  for_each_row(p.batch, p.num_heads_q, p.num_queries, [&](const RowIndex& at) {
    const int64_t position = p.cache.num_old(at.batch, p.capacity) + (p.rotary.queries_advance ? at.row : 0);
    rotate_row<Element>(p.rotary, position, p.head_dim_qk, {p.q, at}, {p.q_rotated, at});
  });
}

}  // namespace

void append_kv(const AppendParams& params) {
  with_element(params.element, [&](auto* type) {
    using Element = std::remove_pointer_t<decltype(type)>;
    append_new_keys<Element>(params);
    if (params.rotary.present()) rotate_queries<Element>(params);
  });
}

}  // namespace flash_attn_ext::cpu
