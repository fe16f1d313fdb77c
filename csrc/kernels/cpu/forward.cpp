// Forward pass: O = softmax(score(Q K^T)) V and its LSE (Dao 2023, "FlashAttention-2", algorithm 1).
//
// Work item: one tile of kStationaryRows queries of one head. It streams over the key tiles that it sees:
//   S = Q K^T (K packed transposed) -> scores -> P = exp(S - m), row by row -> O = O * factor + P V.
// There is an m and an l for each row; O is scaled by 1 / l at the end.
#include <algorithm>
#include <vector>

#include "attention/online_softmax.h"
#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cpu/products/packed_operand.h"
#include "kernels/cpu/products/row_product.h"
#include "kernels/cpu/rows/row_ops.h"
#include "kernels/cpu/rows/score_row.h"
#include "kernels/cpu/tiles.h"
#include "kernels/cpu/work_queue.h"

namespace flash_attn_ext::cpu {
namespace {

using attention::Coordinate;
using attention::ForwardParams;
using attention::Interval;
using attention::Sequence;
using attention::TileCoverage;

template <class Real>
struct ForwardOperands {
  RowProduct<Real> qk;
  PackedOperand<Real> v;

  explicit ForwardOperands(const ForwardParams& p)
      : qk(p, {p.q, p.element, p.head_dim_qk}, {p.k, p.element, p.head_dim_qk}),
        v(p, {p.v, p.element, p.head_dim_v}, Side::kKeys, Form::kRows) {}
};

template <class Real>
class ForwardWorker {
 public:
  ForwardWorker(const ForwardParams& params, const ForwardOperands<Real>& operands)
      : p_(params),
        operands_(operands),
        transform_(params.score_mod.transform<Real, VectorMath>()),
        q_(operands.qk),
        scores_(kStationaryRows * kStreamedRows),
        out_(kStationaryRows * params.head_dim_v),
        added_(kStreamedRows),
        keep_(kStreamedRows),
        softmax_(kStationaryRows) {}

  void run(const Sequence& sequence, int64_t head, const Interval& queries) {
    sequence_ = sequence;
    head_ = head;
    queries_ = queries;
    const int64_t num_queries = queries.end - queries.begin;
    std::fill_n(softmax_.begin(), num_queries, attention::SoftmaxState<Real>{});
    std::fill_n(out_.data(), num_queries * p_.head_dim_v, Real(0));
    q_.load(rows());
    for_each_slice(p_.visibility.keys_of_tile(queries, sequence), sequence.num_keys,
                   [&](const StreamedSlice& keys) { step(keys); });
    finish();
  }

 private:
  int64_t num_queries() const { return queries_.end - queries_.begin; }
  int64_t key_head() const { return head_ / p_.queries_per_key_head(); }
  RowRange rows() const { return {sequence_.batch, head_, sequence_.query_begin + queries_.begin, num_queries()}; }
  Block<Real> out() { return {out_.data(), p_.head_dim_v}; }

  void step(const StreamedSlice& keys) {
    const Block<Real> scores = {scores_.data(), keys.width};
    q_.multiply(key_head(), keys, scores.data);

    const Interval key_range = {keys.first, keys.first + keys.count};
    const bool full = p_.visibility.coverage(queries_, key_range, sequence_) == TileCoverage::kFull;
    for (int64_t i = 0; i < num_queries(); ++i) {
      const Interval seen =
          full ? Interval{0, keys.count} : within(p_.visibility.keys_of(queries_.begin + i, sequence_), keys);
      softmax_row(i, keys, seen, scores.row(i));
    }

    Block<const Real> v = operands_.v.tile(sequence_.batch, key_head(), keys.tile);
    v.data += keys.offset_in_tile() * v.stride;
    const GemmShape shape = {num_queries(), p_.head_dim_v, keys.count};
    const Block<const Real> probabilities = {scores.data, scores.stride};
    if (operands_.v.finite(sequence_.batch, key_head(), keys.tile)) {
      multiply(shape, probabilities, v, out(), Accumulate::kYes);
    } else {
      multiply_nonzero(shape, probabilities, v, out(), Weights::kLeft);
    }
  }

  // Products of one query become its unnormalised probabilities; what it does not see becomes 0.
  void softmax_row(int64_t i, const StreamedSlice& keys, const Interval& seen, Real* row) {
    std::fill(row, row + seen.begin, Real(0));
    std::fill(row + seen.end, row + keys.count, Real(0));
    if (seen.empty()) return;
    Real* scores = row + seen.begin;
    const int64_t count = seen.end - seen.begin;
    const ScoreRun run = {{sequence_.batch, head_, queries_.begin + i, keys.first + seen.begin}, count};
    attention::SoftmaxState<Real>& softmax = softmax_[i];
    const Real factor = softmax.raise_maximum(row_maximum(run, scores));
    if (factor != Real(1)) multiply_row(out().row(i), p_.head_dim_v, factor);
    softmax.l += exponentiate_row(scores, count, softmax.shift());
    if (p_.dropout.enabled()) {
      load_keep(p_.dropout, run, keep_.data());
      multiply_rows(scores, keep_.data(), count);
    }
  }

  Real row_maximum(const ScoreRun& run, Real* scores) {
    if (p_.score_mod.plain()) return scale_row(scores, run.count, transform_.scale);
    const Real* added = load_added(p_.score_mod, run, p_.visibility.diagonal(sequence_), added_.data());
    return transform_row(scores, added, run.count, transform_);
  }

  void finish() {
    for (int64_t i = 0; i < num_queries(); ++i) {
      attention::SoftmaxState<Real>& softmax = softmax_[i];
      Real factor = Real(1);
      if (p_.sink != nullptr) factor = softmax.add_sink(static_cast<const Real*>(p_.sink)[head_]);
      multiply_row(out().row(i), p_.head_dim_v, factor * softmax.output_factor());
      const attention::LogSumExp<Real> lse = softmax.log_sum_exp();
      const int64_t row = rows().begin + i;
      *p_.lse.at<Real>(sequence_.batch, head_, row) = lse.value;
      if (p_.lse_residual.present()) *p_.lse_residual.at<Real>(sequence_.batch, head_, row) = lse.residual;
    }
    store_rows<Real>({p_.out, p_.element, p_.head_dim_v}, rows(), {out_.data(), p_.head_dim_v});
  }

  const ForwardParams& p_;
  const ForwardOperands<Real>& operands_;
  const Transform<Real> transform_;
  typename RowProduct<Real>::Rows q_;
  Scratch<Real> scores_, out_, added_, keep_;
  std::vector<attention::SoftmaxState<Real>> softmax_;
  Sequence sequence_{};
  int64_t head_ = 0;
  Interval queries_{};
};

template <class Real>
void forward_as(const ForwardParams& p) {
  ForwardOperands<Real> operands(p);
  const int64_t tiles = num_tiles(p.sequences.max_seqlen_q, kStationaryRows);
  const int64_t bytes = operands.qk.packed().bytes_per_key_head() + operands.v.bytes_per_key_head();
  for (const HeadRange& key_heads : head_groups(p, bytes)) {
    operands.qk.packed().load(key_heads);
    operands.v.load(key_heads);
    const int64_t first_head = key_heads.begin * p.queries_per_key_head();
    const int64_t num_heads = (key_heads.end - key_heads.begin) * p.queries_per_key_head();
    run_items(num_heads * tiles, [&] {
      return [&, worker = ForwardWorker<Real>(p, operands)](int64_t item) mutable {
        const int64_t head_index = first_head + item % num_heads;
        const int64_t begin = (tiles - 1 - item / num_heads) * kStationaryRows;  // the last queries see most: first
        const Sequence sequence = p.sequences.at(head_index / p.num_heads_q);
        const int64_t end = std::min(begin + kStationaryRows, sequence.num_queries);
        if (begin < end) worker.run(sequence, head_index % p.num_heads_q, {begin, end});
      };
    });
  }
}

}  // namespace

void forward(const ForwardParams& params) {
  params.element == attention::ElementType::kFloat64 ? forward_as<double>(params) : forward_as<float>(params);
}

}  // namespace flash_attn_ext::cpu
