// Scores and their gradients for (query, key) pairs, 32 at a time; lane i owns the i-th pair.
//   score = capped - slope * |key - (query + diagonal)| + bias;  P = exp(score - lse);  dS = P (dP - delta)
// A masked pair is known before its product is computed, so that no NaN of its rows is ever read. For a pair whose P is
// 0, no dP is computed.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <limits>

#include "kernels/common/rows/warp_rows.cuh"

namespace flash_attn_ext::common {

struct PreciseMath {
  template <class Real>
  __device__ __forceinline__ static Real tanh(Real x) {
    return ::tanh(x);
  }
};

template <class Real>
__device__ __forceinline__ Real minus_infinity() {
  return -std::numeric_limits<Real>::infinity();
}

// exp, but 0 where the result would be subnormal: then the same weights are exactly 0 as on the other backends.
template <class Real>
__device__ __forceinline__ Real exponential(Real x) {
  return x < (sizeof(Real) == 8 ? Real(-708) : Real(-87)) ? Real(0) : exp(x);
}

// A pair before its product is known.
template <class Real>
struct Pair {
  attention::Coordinate at;
  bool visible;
  Real bias;
};

template <class Real>
__device__ __forceinline__ Real load_bias(const attention::BroadcastView& view, const attention::Coordinate& at) {
  const int64_t offset = view.offset(at);
  switch (view.element) {
    case attention::ElementType::kFloat32:
      return static_cast<Real>(static_cast<const float*>(view.data)[offset]);
    case attention::ElementType::kFloat64:
      return static_cast<Real>(static_cast<const double*>(view.data)[offset]);
    case attention::ElementType::kBFloat16:
      return static_cast<Real>(static_cast<float>(static_cast<const __nv_bfloat16*>(view.data)[offset]));
    case attention::ElementType::kFloat16:
      return static_cast<Real>(static_cast<float>(static_cast<const __half*>(view.data)[offset]));
    case attention::ElementType::kBool:
      break;  // a bool bias is a mask
  }
  return Real(0);
}

template <class Real>
__device__ __forceinline__ Pair<Real> pair_at(const attention::AttentionParams& p, const attention::Sequence& sequence,
                                              const attention::Coordinate& at) {
  Pair<Real> pair = {at, false, Real(0)};
  if (at.query >= sequence.num_queries) return pair;
  const attention::Interval seen = p.visibility.keys_of(at.query, sequence);
  pair.visible = seen.begin <= at.key && at.key < seen.end;
  const attention::BroadcastView& mask = p.score_mod.mask;
  if (pair.visible && mask.present()) pair.visible = static_cast<const uint8_t*>(mask.data)[mask.offset(at)] != 0;
  const attention::RowIntervals& intervals = p.score_mod.intervals;
  if (pair.visible && intervals.present()) {
    pair.visible = intervals.sees(intervals.row(sequence, at.head, at.query), at.key);
  }
  const attention::BlockMask& blocks = p.score_mod.blocks;
  if (pair.visible && blocks.present()) pair.visible = blocks.sees(blocks.row(at.batch, at.head, at.query), at.key);
  if (pair.visible && p.score_mod.bias.present()) {
    pair.bias = load_bias<Real>(p.score_mod.bias, at);
    pair.visible = pair.bias != minus_infinity<Real>();
  }
  return pair;
}

// The score of a visible pair. Terms are added in the order of the tensor-core kernels: with a bias of -1e4 another
// order would give another score, and the LSE may be theirs.
template <class Real>
__device__ __forceinline__ Real score_of(const attention::AttentionParams& p, const attention::Sequence& sequence,
                                         const Pair<Real>& pair, Real capped) {
  Real score = capped;
  if (p.score_mod.alibi.present()) {
    const Real slope = p.score_mod.alibi.at<Real>(pair.at.batch, pair.at.head);
    const int64_t derivative = attention::alibi_derivative(pair.at.query, pair.at.key, p.visibility.diagonal(sequence));
    score += slope * static_cast<Real>(derivative);
  }
  return score + pair.bias;
}

// The factor of the pair's weight under dropout.
template <class Real>
__device__ __forceinline__ Real kept_factor(const attention::Dropout& dropout, const attention::Coordinate& at) {
  if (!dropout.enabled()) return Real(1);
  const attention::PhiloxCounter draws = dropout.draws(at.batch, at.head, at.query, at.key);
  return dropout.keeps(draws, at.query, at.key) ? static_cast<Real>(dropout.rescale) : Real(0);
}

// The rows whose products the pairs of a warp need: one side is fixed, and lane i's pair has the i-th row of the other
// one.
template <class Element>
struct PairRows {
  Rows<Element> fixed_qk;
  Rows<Element> streamed_qk;
  Rows<Element> fixed_v;  // of V or dO
  Rows<Element> streamed_v;
};

// All 0 for a pair that is masked or whose P is 0.
template <class Real>
struct PairGradient {
  Real weight = Real(0);    // P after dropout, which multiplies dO
  Real dscore = Real(0);    // d loss / d score
  Real dproduct = Real(0);  // d loss / d (scale * q.k)
};

template <class Element>
__device__ __forceinline__ PairGradient<tile::Accumulate<Element>> differentiate(
    const attention::BackwardParams& p, const attention::Sequence& sequence,
    const Pair<tile::Accumulate<Element>>& pair, const PairRows<Element>& rows) {
  using Real = tile::Accumulate<Element>;
  const auto transform = p.score_mod.transform<Real, PreciseMath>();
  const int64_t row = sequence.query_begin + pair.at.query;
  const Real lse = pair.visible ? *p.lse.at<const Real>(pair.at.batch, pair.at.head, row) : minus_infinity<Real>();
  // A query that sees no key has no weights, whatever its rows hold.
  const bool visible = lse != minus_infinity<Real>();
  const unsigned formed = __ballot_sync(kAllLanes, visible);
  if (formed == 0) return {};
  const Real capped = transform.cap(multiply_rows(rows.fixed_qk, rows.streamed_qk, formed));
  const Real score = score_of(p, sequence, pair, capped);
  Real probability = Real(0);
  if (visible && score != minus_infinity<Real>()) {
    const Real residual =
        p.lse_residual.present() ? *p.lse_residual.at<const Real>(pair.at.batch, pair.at.head, row) : Real(0);
    probability = exponential((score - lse) - residual);
  }
  const bool weighted = probability != Real(0);
  const Real kept = weighted ? kept_factor<Real>(p.dropout, pair.at) : Real(0);
  const unsigned kept_pairs = __ballot_sync(kAllLanes, kept != Real(0));
  const Real dprobability = kept * multiply_rows(rows.fixed_v, rows.streamed_v, kept_pairs);
  PairGradient<Real> gradient;
  if (!weighted) return gradient;
  if (kept != Real(0)) gradient.weight = probability * kept;  // the weight of a dropped NaN is 0
  gradient.dscore = probability * (dprobability - *p.delta.at<const Real>(pair.at.batch, pair.at.head, row));
  gradient.dproduct = gradient.dscore;
  if (transform.softcap != Real(0) && gradient.dscore != Real(0)) gradient.dproduct *= transform.cap_derivative(capped);
  return gradient;
}

// The rows of a query head of a sequence, and of its key head, in the tensors.
struct HeadRows {
  const attention::Sequence& sequence;
  int64_t head;
  int64_t key_head;

  __device__ __forceinline__ RowPlace query_row(int64_t query) const {
    return {sequence.batch, head, sequence.query_begin + query};
  }
  __device__ __forceinline__ RowPlace key_row(int64_t key) const {
    return {sequence.batch, key_head, sequence.key_begin + key};
  }
};

// Gradients of the pairs of one query with keys [first_key, first_key + 32); both are positions inside the sequence.
template <class Element>
__device__ __forceinline__ PairGradient<tile::Accumulate<Element>> gradients_of_query(
    const attention::BackwardParams& p, const HeadRows& coord, int64_t query, int64_t first_key) {
  const attention::Coordinate at = {coord.sequence.batch, coord.head, query, first_key + tile::lane()};
  return differentiate<Element>(p, coord.sequence, pair_at<tile::Accumulate<Element>>(p, coord.sequence, at),
                                {rows_from<Element>(p.q, coord.query_row(query), p.head_dim_qk),
                                 rows_from<Element>(p.k, coord.key_row(first_key), p.head_dim_qk),
                                 rows_from<Element>(p.dout, coord.query_row(query), p.head_dim_v),
                                 rows_from<Element>(p.v, coord.key_row(first_key), p.head_dim_v)});
}

// Gradients of the pairs of one key with queries [first_query, first_query + 32).
template <class Element>
__device__ __forceinline__ PairGradient<tile::Accumulate<Element>> gradients_of_key(const attention::BackwardParams& p,
                                                                                    const HeadRows& coord,
                                                                                    int64_t first_query, int64_t key) {
  const attention::Coordinate at = {coord.sequence.batch, coord.head, first_query + tile::lane(), key};
  return differentiate<Element>(p, coord.sequence, pair_at<tile::Accumulate<Element>>(p, coord.sequence, at),
                                {rows_from<Element>(p.k, coord.key_row(key), p.head_dim_qk),
                                 rows_from<Element>(p.q, coord.query_row(first_query), p.head_dim_qk),
                                 rows_from<Element>(p.v, coord.key_row(key), p.head_dim_v),
                                 rows_from<Element>(p.dout, coord.query_row(first_query), p.head_dim_v)});
}

}  // namespace flash_attn_ext::common
