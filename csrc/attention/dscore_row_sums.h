// The gradient of a bias that is broadcast along keys, computed from the row sums of dS.
//
// Softmax is invariant to a number that is added to all scores of a row. Such a bias therefore shifts only the LSE, and
// the row's scores relative to its sink. Let D = rowsum(dout * out) and s = exp(sink - lse). P of the keys adds up to
// 1 - s, so:
//
//   sum of dS = sum of P (dP - (D - dlse)) = D - (1 - s)(D - dlse) = s D + (1 - s) dlse
//
// This holds whatever else changes a score, and whatever dropout drops. Without a sink the sum is dlse. Summed term by
// term, it would be wrong by D times the rounding error of P's row sum, which may be more than dlse itself.
#pragma once

#include "attention/division.h"
#include "attention/online_softmax.h"
#include "attention/params.h"

namespace flash_attn_ext::attention {

// The statistics of one query. `delta` is D.
template <class Real>
struct DscoreRow {
  LogSumExp<Real> lse;
  Real delta;
  Real dlse;

  FLASH_HOST_DEVICE double sum(Real sink) const {
    constexpr Real kMinusInfinity = SoftmaxState<Real>::kMinusInfinity;
    if (lse.value == kMinusInfinity) return 0.0;  // the row sees no key
    double of_sink = 0.0;
    double of_keys = 1.0;
    if (sink != kMinusInfinity) {
      const double exponent = (double{sink} - lse.value) - lse.residual;
      of_sink = exp(exponent);
      of_keys = -expm1(exponent);
      if (of_keys == 0.0) return 0.0;
    }
    // With a D that is not finite this is NaN, as dS is there.
    return of_sink * delta_for_sink(sink, lse.value, delta, Real(0)) + of_keys * dlse;
  }
};

// The elements of the gradient that one thread or CTA computes: those of some queries of a batch entry and a head. Of a
// dimension along which the bias is broadcast, an owner has all indices, and sums over them.
struct DbiasOwner {
  Interval batches;
  Interval heads;
  Interval queries;

  // Returns the sum of dS over the rows of queries begin, begin + step, ... before end of `of_queries`. It also
  // subtracts dlse from their delta, which is D before.
  template <class Real>
  FLASH_HOST_DEVICE double finish_delta(const BackwardParams& p, const Interval& of_queries, int64_t step) const {
    double sum = 0.0;
    for (int64_t batch = batches.begin; batch < batches.end; ++batch) {
      const Sequence sequence = p.sequences.at(batch);
      const int64_t end = of_queries.end < sequence.num_queries ? of_queries.end : sequence.num_queries;
      for (int64_t head = heads.begin; head < heads.end; ++head) {
        const Real sink =
            p.sink != nullptr ? static_cast<const Real*>(p.sink)[head] : SoftmaxState<Real>::kMinusInfinity;
        for (int64_t query = of_queries.begin; query < end; query += step) {
          const int64_t place = sequence.query_begin + query;
          const auto statistic = [&](const StatisticView& view) {
            return view.present() ? *view.at<const Real>(batch, head, place) : Real(0);
          };
          const DscoreRow<Real> row = {
              {statistic(p.lse), statistic(p.lse_residual)}, statistic(p.delta), statistic(p.dlse)};
          *p.delta.at<Real>(batch, head, place) = row.delta - row.dlse;
          sum += row.sum(sink);
        }
      }
    }
    return sum;
  }

  FLASH_HOST_DEVICE int64_t offset(const BiasGradient& g, int64_t query) const {
    return batches.begin * g.batch_stride + heads.begin * g.head_stride + query * g.query_stride;
  }
};

// All owners, each with up to `queries_each` queries. Every row belongs to exactly one owner.
class DbiasOwners {
 public:
  FLASH_HOST_DEVICE DbiasOwners(const BackwardParams& p, int64_t queries_each)
      : p_(p), step_(p.dbias.per_query ? queries_each : p.sequences.max_seqlen_q) {}

  FLASH_HOST_DEVICE int64_t count() const { return (p_.dbias.per_batch ? p_.batch : 1) * heads() * query_steps(); }

  FLASH_HOST_DEVICE DbiasOwner at(int64_t index) const {
    const int64_t row = index / query_steps();
    const int64_t first = index % query_steps() * step_;
    const int64_t rest = p_.sequences.max_seqlen_q - first;
    return {range(p_.dbias.per_batch, row / heads(), p_.batch),
            range(p_.dbias.per_head, row % heads(), p_.num_heads_q),
            {first, first + (rest < step_ ? rest : step_)}};
  }

 private:
  FLASH_HOST_DEVICE int64_t heads() const { return p_.dbias.per_head ? p_.num_heads_q : 1; }
  FLASH_HOST_DEVICE int64_t query_steps() const {
    return p_.dbias.per_query ? ceil_div(p_.sequences.max_seqlen_q, step_) : 1;
  }
  FLASH_HOST_DEVICE static Interval range(bool owned, int64_t index, int64_t length) {
    return owned ? Interval{index, index + 1} : Interval{0, length};
  }

  const BackwardParams& p_;
  int64_t step_;
};

}  // namespace flash_attn_ext::attention
