#include "kernels/cpu/gemm/row_gemm.h"

#include <type_traits>

#include "kernels/cpu/gemm/tile_gemm.h"

namespace flash_attn_ext::cpu {
namespace {

using attention::ElementType;
using attention::Interval;
using attention::Sequence;

// The same rows, with each pair of neighbouring 16-bit elements as one of 32 bits.
Operand as_pairs(const Operand& operand) {
  attention::MatrixView view = operand.view;
  view.batch_stride /= 2;
  view.head_stride /= 2;
  view.row_stride /= 2;
  return {view, ElementType::kFloat32, operand.columns / 2};
}

bool readable_as_pairs(const Operand& operand) {
  const attention::MatrixView& view = operand.view;
  return operand.columns % 2 == 0 && view.column_stride == 1 && view.row_stride % 2 == 0 && view.head_stride % 2 == 0 &&
         view.batch_stride % 2 == 0 && reinterpret_cast<uintptr_t>(view.data) % 4 == 0;
}

// The limit for bfloat16 rows if the CPU multiplies them. It is lower, because GEMMs of packed tiles are then faster.
constexpr int64_t kFewPairedRows = 32;
// The limit for queries whose keys fit one tile, because one tile costs little to pack. Query heads of a KV group still
// share a work tile.
constexpr int64_t kFewQueriesOfOneTile = 12;

}  // namespace

bool has_few_rows(const attention::AttentionParams& params) {
  const int64_t queries = params.sequences.max_seqlen_q;
  if (one_tile_of_keys(params) && queries > kFewQueriesOfOneTile) return false;
  const bool pairs = params.element == ElementType::kBFloat16 && can_multiply_pairs();
  return queries * params.queries_per_key_head() <= (pairs ? kFewPairedRows : kStationaryRows);
}

bool has_few_keys(const attention::AttentionParams& params) { return params.sequences.max_seqlen_k <= kFewKeys; }

template <class Real>
bool RowGemm<Real>::multiplies_pairs(const Operand& left, const Operand& right) {
  return std::is_same_v<Real, float> && right.element == ElementType::kBFloat16 && left.view.column_stride == 1 &&
         left.view.row_stride <= kLargestStride && readable_as_pairs(right) && can_multiply_pairs();
}

template <class Real>
RowGemm<Real>::RowGemm(const attention::AttentionParams& params, const Operand& left, const Operand& right)
    : p_(params),
      left_(left),
      unpacked_right_(right),
      in_place_(has_few_rows(params) || has_few_keys(params)),
      pairs_(!in_place_ && multiplies_pairs(left, right)),
      right_(params, pairs_ ? as_pairs(right) : right, Form::kTransposed) {}

template <class Real>
void RowGemm<Real>::Rows::load(const Sequence& sequence, const Interval& heads, const Interval& queries) {
  sequence_ = sequence;
  const int64_t count = queries.end - queries.begin;
  rows_ = {sequence.batch, heads.begin, sequence.query_begin + queries.begin, count};
  if (gemm_.pairs_) return;
  if (heads.end - heads.begin == 1) {
    loaded_ = load_rows<Real>(gemm_.left_, rows_, scratch_.data());
    return;
  }
  const int64_t columns = gemm_.left_.columns;
  for (int64_t head = heads.begin; head < heads.end; ++head) {
    convert_rows<Real>(gemm_.left_, {rows_.batch, head, rows_.begin, count},
                       scratch_.data() + (head - heads.begin) * count * columns);
  }
  rows_.count *= heads.end - heads.begin;
  loaded_ = {scratch_.data(), columns};
}

template <class Real>
void RowGemm<Real>::Rows::multiply(int64_t key_head, const StreamedSlice& keys, Real* c) {
  const int64_t columns = gemm_.left_.columns;
  if (gemm_.in_place_) {
    const Positions positions = {sequence_, key_head, {keys.first, keys.first + keys.count}};
    const Block<const Real> right = load_positions<Real>(gemm_.p_, gemm_.unpacked_right_, positions, keys_.data());
    return multiply_few_rows_transposed({rows_.count, keys.count, columns}, loaded_, right, {c, keys.width});
  }
  Block<const Real> right = gemm_.right_.tile(rows_.batch, key_head, keys.tile);
  right.data += keys.offset_in_tile();
  const GemmShape shape = {rows_.count, keys.width, columns};
  if constexpr (std::is_same_v<Real, float>) {
    if (gemm_.pairs_) {
      const attention::MatrixView& left = gemm_.left_.view;
      const Block<const uint16_t> rows = {left.row<const uint16_t>(rows_.batch, rows_.head, rows_.begin),
                                          left.row_stride};
      return multiply_pairs(shape, rows, right, {c, keys.width});
    }
  }
  cpu::multiply(shape, loaded_, right, {c, keys.width}, Accumulate::kNo);
}

template class RowGemm<float>;
template class RowGemm<double>;

}  // namespace flash_attn_ext::cpu
