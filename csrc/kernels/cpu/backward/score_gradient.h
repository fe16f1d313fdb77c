// P and dS of a tile of queries and a slice of keys, recomputed from Q, K, V, dO and the statistics. Rows are queries.
#pragma once

#include <algorithm>
#include <limits>

#include "attention/params.h"
#include "kernels/config/cpu.h"
#include "kernels/cpu/gemm/row_gemm.h"
#include "kernels/cpu/rows/row_ops.h"
#include "kernels/cpu/rows/score_row.h"
#include "kernels/cpu/schedule/selected_keys.h"
#include "kernels/cpu/schedule/tiles.h"
#include "kernels/cpu/schedule/work_queue.h"

namespace flash_attn_ext::cpu {

// LSE, its residual and delta of a tile of queries, as the gradient of a score needs them.
template <class Real>
class QueryStatistics {
 public:
  QueryStatistics() : lse_(kStationaryRows), residual_(kStationaryRows), delta_(kStationaryRows) {}

  // Queries [first, first + count) of the sequence.
  void load(const attention::BackwardParams& p, const attention::Sequence& sequence, int64_t head, int64_t first,
            int64_t count) {
    constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
    const int64_t row = sequence.query_begin + first;
    for (int64_t i = 0; i < count; ++i) {
      const Real lse = *p.lse.template at<const Real>(sequence.batch, head, row + i);
      // For a row that sees no key, exp(score - inf) = 0: its probabilities and gradients vanish without a branch.
      lse_.data()[i] = lse == -kInfinity ? kInfinity : lse;
      residual_.data()[i] =
          p.lse_residual.present() ? *p.lse_residual.template at<const Real>(sequence.batch, head, row + i) : Real(0);
      delta_.data()[i] = *p.delta.template at<const Real>(sequence.batch, head, row + i);
    }
  }

  const Real* lse() const { return lse_.data(); }
  const Real* delta() const { return delta_.data(); }
  Real lse(int64_t i) const { return lse_.data()[i]; }
  Real residual(int64_t i) const { return residual_.data()[i]; }
  Real delta(int64_t i) const { return delta_.data()[i]; }

 private:
  Scratch<Real> lse_, residual_, delta_;
};

template <class Real>
struct ScoreGradientOperands {
  RowGemm<Real> qk, dout_v;

  explicit ScoreGradientOperands(const attention::BackwardParams& p)
      : qk(p, {p.q, p.element, p.head_dim_qk}, {p.k, p.element, p.head_dim_qk}),
        dout_v(p, {p.dout, p.element, p.head_dim_v}, {p.v, p.element, p.head_dim_v}) {}

  int64_t bytes_per_key_head() const { return qk.bytes_per_key_head() + dout_v.bytes_per_key_head(); }

  void load(const HeadRange& key_heads) {
    qk.load(key_heads);
    dout_v.load(key_heads);
  }
};

template <class Real>
class ScoreGradient {
 public:
  ScoreGradient(const attention::BackwardParams& params, const ScoreGradientOperands<Real>& operands)
      : p_(params),
        transform_(params.score_mod.transform<Real, VectorMath>()),
        clip_(operands.qk.clip()),
        q_(operands.qk),
        dout_(operands.dout_v),
        selected_keys_(params),
        p_tile_(kStationaryRows * kStreamedRows),
        ds_tile_(kStationaryRows * kStreamedRows),
        added_(kStreamedRows),
        keep_(kStreamedRows),
        dscore_(kStreamedRows) {}

  // Loads the rows of Q and dO that multiply() works on.
  void start(const attention::Sequence& sequence, int64_t head, const attention::Interval& queries) {
    sequence_ = sequence;
    head_ = head;
    queries_ = queries;
    q_.load(sequence, {head, head + 1}, queries);
    dout_.load(sequence, {head, head + 1}, queries);
    selected_keys_.start(sequence, {head, head + 1}, queries);
    statistics_.load(p_, sequence, head, queries.begin, num_queries());
  }

  // Whether intervals and blocks leave any of the keys to a query.
  bool sees(const StreamedSlice& keys) const {
    return selected_keys_.coverage({keys.first, keys.first + keys.count}) != attention::TileCoverage::kNone;
  }

  // S = Q K^T, and dP = dO V^T where dS is wanted.
  void multiply(const StreamedSlice& keys, bool with_dp) {
    const int64_t key_head = head_ / p_.queries_per_key_head();
    q_.multiply(key_head, keys, p_tile_.data());
    if (with_dp) return dout_.multiply(key_head, keys, ds_tile_.data());
    // differentiate() reads this tile even where dS is not requested, and nothing reads its results then.
    std::fill_n(ds_tile_.data(), num_queries() * keys.width, Real(0));
  }

  // Turns the products into p() and ds(). Calls function(run, dscore) for each query's visible keys; dscore is d loss /
  // d score, which is dS before the derivative of a softcap.
  template <class Function>
  void differentiate(const StreamedSlice& keys, Function&& function) {
    const attention::Interval key_range = {keys.first, keys.first + keys.count};
    const bool full = p_.visibility.coverage(queries_, key_range, sequence_) == attention::TileCoverage::kFull;
    score_mod_ = &selected_keys_.score_mod(selected_keys_.coverage(key_range));
    const bool whole = full && score_mod_->plain() && !p_.dropout.enabled();
    if (whole) {
      const ScoreRows<Real> rows = {p_tile_.data(), keys.width, num_queries(), keys.count};
      gradient_rows_plain(rows, ds_tile_.data(), statistics_.lse(), statistics_.delta(), transform_.scale);
    }
    for (int64_t i = 0; i < num_queries(); ++i) {
      const attention::Interval seen = full ? attention::Interval{0, keys.count}
                                            : within(p_.visibility.keys_of(queries_.begin + i, sequence_), keys);
      for (Real* row : {p_tile_.data() + i * keys.width, ds_tile_.data() + i * keys.width}) {
        std::fill(row, row + seen.begin, Real(0));
        std::fill(row + seen.end, row + keys.count, Real(0));
      }
      if (seen.empty()) continue;
      const ScoreRun run = {{sequence_.batch, head_, queries_.begin + i, keys.first + seen.begin},
                            seen.end - seen.begin};
      const int64_t offset = i * keys.width + seen.begin;
      function(run, whole ? ds_tile_.data() + offset
                          : gradient_row(i, run, p_tile_.data() + offset, ds_tile_.data() + offset));
    }
  }

  Block<const Real> p(const StreamedSlice& keys) const { return {p_tile_.data(), keys.width}; }  // as it multiplies dO
  Block<const Real> ds(const StreamedSlice& keys) const { return {ds_tile_.data(), keys.width}; }  // by scale * Q K^T
  int64_t clip() const { return clip_; }
  int64_t head() const { return head_; }
  int64_t num_queries() const { return queries_.end - queries_.begin; }

 private:
  // Returns d loss / d score. Without a softcap it is dS.
  const Real* gradient_row(int64_t i, const ScoreRun& run, Real* p, Real* ds) {
    GradientRow<Real> row = {.n = run.count,
                             .p = p,
                             .ds = ds,
                             .lse = statistics_.lse(i),
                             .residual = statistics_.residual(i),
                             .delta = statistics_.delta(i)};
    if (score_mod_->plain() && !p_.dropout.enabled()) {
      gradient_row_plain(row, transform_.scale);
      return ds;
    }
    row.added = load_added(*score_mod_, run, sequence_, p_.visibility.diagonal(sequence_), added_.data());
    if (p_.dropout.enabled()) {
      load_keep(p_.dropout, run, keep_.data());
      row.keep = keep_.data();
    }
    row.dscore = p_.score_mod.softcap == 0.0 ? ds : dscore_.data();
    gradient_row_generic(row, transform_);
    return row.dscore;
  }

  const attention::BackwardParams& p_;
  const Transform<Real> transform_;
  const int64_t clip_;
  typename RowGemm<Real>::Rows q_, dout_;
  SelectedKeys selected_keys_;
  const attention::ScoreMod* score_mod_ = nullptr;  // of the slice of keys
  Scratch<Real> p_tile_, ds_tile_, added_, keep_, dscore_;
  QueryStatistics<Real> statistics_;
  attention::Sequence sequence_{};
  int64_t head_ = 0;
  attention::Interval queries_{};
};

}  // namespace flash_attn_ext::cpu
