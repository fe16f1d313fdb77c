// dS for a tile of queries and a slice of keys, recomputed from Q, K, V, dO and the statistics: the part that the dQ
// and dBias kernels share. Rows are queries.
#pragma once

#include <algorithm>

#include "kernels/cpu/packed_operand.h"
#include "kernels/cpu/query_statistics.h"
#include "kernels/cpu/row_ops.h"
#include "kernels/cpu/score_row.h"
#include "kernels/cpu/tiles.h"

namespace flash_attn_ext::cpu {

template <class Real>
struct ScoreGradientOperands {
  PackedOperand<Real> k_transposed, v_transposed;

  explicit ScoreGradientOperands(const attention::BackwardParams& p)
      : k_transposed(p, {p.k, p.element, p.head_dim_qk}, Side::kKeys, Form::kTransposed),
        v_transposed(p, {p.v, p.element, p.head_dim_v}, Side::kKeys, Form::kTransposed) {}

  int64_t bytes_per_key_head() const { return k_transposed.bytes_per_key_head() + v_transposed.bytes_per_key_head(); }

  void load(const HeadRange& key_heads) {
    k_transposed.load(key_heads);
    v_transposed.load(key_heads);
  }
};

template <class Real>
class ScoreGradient {
 public:
  ScoreGradient(const attention::BackwardParams& params, const ScoreGradientOperands<Real>& operands)
      : p_(params),
        operands_(operands),
        transform_(params.score_mod.transform<Real, VectorMath>()),
        q_rows_(kStationaryRows * params.head_dim_qk),
        dout_rows_(kStationaryRows * params.head_dim_v),
        dscore_tile_(kStationaryRows * kStreamedRows),
        dproduct_tile_(kStationaryRows * kStreamedRows),
        added_(kStreamedRows),
        keep_(kStreamedRows),
        unused_p_(kStreamedRows) {}

  // Loads the rows of Q and dO that compute() works on.
  void start(const attention::Sequence& sequence, int64_t head, const attention::Interval& queries) {
    sequence_ = sequence;
    head_ = head;
    queries_ = queries;
    const RowRange rows = {sequence.batch, head, sequence.query_begin + queries.begin, num_queries()};
    q_ = load_rows<Real>({p_.q, p_.element, p_.head_dim_qk}, rows, q_rows_.data());
    dout_ = load_rows<Real>({p_.dout, p_.element, p_.head_dim_v}, rows, dout_rows_.data());
    statistics_.load(p_, sequence, head, queries.begin, num_queries(), num_queries());
  }

  // Fills dproduct() and dscore(); columns are the slice's keys.
  void compute(const StreamedSlice& keys) {
    const int64_t key_head = head_ / p_.queries_per_key_head();
    Block<const Real> k = operands_.k_transposed.tile(sequence_.batch, key_head, keys.tile);
    Block<const Real> v = operands_.v_transposed.tile(sequence_.batch, key_head, keys.tile);
    k.data += keys.offset_in_tile();
    v.data += keys.offset_in_tile();
    multiply({num_queries(), keys.width, p_.head_dim_qk}, q_, k, {dscore_tile_.data(), keys.width}, Accumulate::kNo);
    multiply({num_queries(), keys.width, p_.head_dim_v}, dout_, v, {dproduct_tile_.data(), keys.width},
             Accumulate::kNo);

    const attention::Interval key_range = {keys.first, keys.first + keys.count};
    const bool full = p_.visibility.coverage(queries_, key_range, sequence_) == attention::TileCoverage::kFull;
    for (int64_t i = 0; i < num_queries(); ++i) {
      const attention::Interval seen = full ? attention::Interval{0, keys.count}
                                            : within(p_.visibility.keys_of(queries_.begin + i, sequence_), keys);
      gradient_row(i, keys, seen);
    }
  }

  Block<const Real> dproduct(const StreamedSlice& keys) const { return {dproduct_tile_.data(), keys.width}; }
  // d loss / d score. Without a softcap the two are one, and a plain score fills only dproduct.
  Block<const Real> dscore(const StreamedSlice& keys) const {
    return plain() ? dproduct(keys) : Block<const Real>{dscore_tile_.data(), keys.width};
  }
  int64_t num_queries() const { return queries_.end - queries_.begin; }

 private:
  bool plain() const { return p_.score_mod.plain() && !p_.dropout.enabled(); }

  void gradient_row(int64_t i, const StreamedSlice& keys, const attention::Interval& seen) {
    Real* dscore_row = dscore_tile_.data() + i * keys.width;
    Real* dproduct_row = dproduct_tile_.data() + i * keys.width;
    for (Real* row : {dscore_row, dproduct_row}) {
      std::fill(row, row + seen.begin, Real(0));
      std::fill(row + seen.end, row + keys.count, Real(0));
    }
    if (seen.empty()) return;
    const int64_t n = seen.end - seen.begin;
    const GradientRow<Real> row = {.n = n,
                                   .product = dscore_row + seen.begin,
                                   .p = unused_p_.data(),
                                   .dproduct = dproduct_row + seen.begin,
                                   .lse = statistics_.lse() + i,
                                   .residual = statistics_.residual() + i,
                                   .delta = statistics_.delta() + i,
                                   .added = added_.data(),
                                   .keep = keep_.data(),
                                   .dscore = dscore_row + seen.begin};
    if (plain()) return gradient_row_plain(row, transform_.scale, Statistics::kPerRow);
    const ScoreRun run = {{sequence_.batch, head_, queries_.begin + i, keys.first + seen.begin}, n, Along::kKeys};
    load_added(p_.score_mod, run, p_.visibility.diagonal(sequence_), added_.data());
    load_keep(p_.dropout, run, keep_.data());
    gradient_row_extended(row, transform_, Statistics::kPerRow);
  }

  const attention::BackwardParams& p_;
  const ScoreGradientOperands<Real>& operands_;
  const Transform<Real> transform_;
  Scratch<Real> q_rows_, dout_rows_, dscore_tile_, dproduct_tile_, added_, keep_, unused_p_;
  QueryStatistics<Real> statistics_;
  Block<const Real> q_{}, dout_{};
  attention::Sequence sequence_{};
  int64_t head_ = 0;
  attention::Interval queries_{};
};

}  // namespace flash_attn_ext::cpu
