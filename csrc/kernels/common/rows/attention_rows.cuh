// One row of a result, exactly as docs/semantics.md defines it, computed by one warp without tensor cores:
//   O[query] and LSE[query];  dQ[query] = scale * dS K;  dK[key] = scale * dS^T Q and dV[key] = P^T dO.
//
// Keys that are not attended to, or have a weight of exactly 0, are not read, so NaN and infinity in them reach no
// result. Tensor cores compute 0 * NaN for them, so their kernels call these functions for rows that have a NaN. They
// are also the whole implementation of float64.
//
// Mapping: the warp iterates over 32 keys (or queries) at a time. It computes their products one after the other, with
// lanes striding over columns. Lane i then computes the score of the i-th one.
#pragma once

#include <type_traits>

#include "attention/key_bias.h"
#include "attention/online_softmax.h"
#include "kernels/common/rows/key_rows.cuh"
#include "kernels/common/rows/pair_score.cuh"

namespace flash_attn_ext::common {

// The columns of a result that a call computes; by default, the whole row. Where several CTAs share a row, each passes
// its own columns, so that no two write to the same place. The LSE is written with column 0.
struct ColumnRange {
  int begin = 0;
  int end = INT32_MAX;
};

// Calls function(slice) for slices of the range that fit a ColumnSums, at least once if the range begins at 0.
template <class Real, class Function>
__device__ __forceinline__ void for_each_slice(const ColumnRange& range, int64_t columns, Function&& function) {
  constexpr int kStep = ColumnSums<Real>::kColumns;
  const int end = columns < range.end ? static_cast<int>(columns) : range.end;
#pragma unroll 1
  for (int begin = range.begin; begin == 0 || begin < end; begin += kStep) {
    function(ColumnSlice{begin, min(begin + kStep, end)});
  }
}

// Stores the slice of a result's row.
template <class Element, class Real>
__device__ __forceinline__ void store_columns(const attention::MatrixView& view, const RowPlace& place,
                                              const ColumnSums<Real>& sums, const ColumnSlice& slice, int64_t columns) {
  Element* row = view.row<Element>(place.batch, place.head, place.row);
  sums.store(row + slice.begin * view.column_stride, view.column_stride, slice.count(columns));
}

__device__ __forceinline__ HeadRows head_rows(const attention::AttentionParams& p, const attention::Sequence& sequence,
                                              int64_t head) {
  return {sequence, head, head / p.queries_per_key_head()};
}

// Keys: where the rows of K and V lie (key_rows.cuh). Params: ForwardParams, or BasicForwardParams.
template <class Element, class Keys, class Params>
struct ForwardRow {
  using Real = tile::Accumulate<Element>;
  static constexpr bool kHasRowMax = std::is_base_of_v<attention::ForwardParams, Params>;
  static constexpr bool kSubtractsBias = std::is_same_v<Keys, OwnKeysWithBias>;

  const Params& p;
  const HeadRows coord;
  int64_t query;
  attention::SoftmaxState<Real> state;
  ColumnSums<Real> out;
  Real largest = minus_infinity<Real>();  // score so far; state.m may be the sink
  Real subtracted = Real(0);              // from biases

  __device__ __forceinline__ void run(const ColumnSlice& slice) {
    if constexpr (kSubtractsBias) subtracted = subtracted_bias();
    // At most two passes. In the first one an element may get its weight before a larger score makes that weight 0, and
    // then a NaN or infinity remains. In the second one m is the row maximum from the start, so that each weight is
    // final.
    for (int pass = 0; pass < 2; ++pass) {
      state.l = Real(0);
      out.clear();
      if (p.sink != nullptr) state.add_sink(static_cast<const Real*>(p.sink)[coord.head] - subtracted);
      add_keys(slice);
      if (state.l != state.l || out.all_finite()) break;
    }
    finish(slice);
  }

 private:
  __device__ __forceinline__ void add_keys(const ColumnSlice& slice) {
    const attention::Sequence& sequence = coord.sequence;
    const auto transform = p.score_mod.template transform<Real, PreciseMath>();
    const attention::Interval seen = p.visibility.keys_of(query, sequence);
#pragma unroll 1
    for (int64_t first = Keys::first(seen.begin); first < seen.end; first += kWarpSize) {
      if (state.l != state.l) return;  // O and the LSE are NaN whatever follows
      Pair<Real> pair = pair_at<Real>(p, sequence, {sequence.batch, coord.head, query, first + tile::lane()});
      if constexpr (kSubtractsBias) pair.bias -= subtracted;
      const unsigned visible = __ballot_sync(kAllLanes, pair.visible);
      if (visible == 0) continue;
      const Real product = multiply_rows(rows_from<Element>(p.q, coord.query_row(query), p.head_dim_qk),
                                         rows_of(p.k, first, p.head_dim_qk), visible);
      const Real score = pair.visible ? score_of(p, sequence, pair, transform.cap(product)) : minus_infinity<Real>();
      const Real maximum = maximum_over_warp(score);
      if (kHasRowMax && maximum > largest) largest = maximum;
      const Real factor = state.raise_maximum(maximum);
      if (factor != Real(1)) out.multiply(factor);
      Real weight = exponential(score - state.shift());
      state.l += sum_over_warp(weight);
      if (weight != Real(0)) weight *= kept_factor<Real>(p.dropout, pair.at);
      if (out.all_nan(slice.count(p.head_dim_v))) continue;  // only the LSE can change
      add_rows(out, rows_of(p.v, first, p.head_dim_v).slice(slice), weight);
    }
  }

  __device__ __forceinline__ Real subtracted_bias() const {
    const attention::Sequence& sequence = coord.sequence;
    const attention::Interval seen = p.visibility.keys_of(query, sequence);
    const int64_t end_of_tile = attention::KeyBiasMaxima::end_of(p, sequence, static_cast<int>(query));
    const Real own = largest_bias(seen.begin, seen.end);
    const Real of_tile = largest_bias(0, min(end_of_tile, sequence.num_keys));
    const bool is_near =
        fabsf(own - attention::subtracted_key_bias(p, coord.head, of_tile)) <= attention::KeyBiasMaxima::kMostDistance;
    return is_near ? attention::subtracted_key_bias(p, coord.head, own) : Real(0);
  }

  // Of keys [begin, end).
  __device__ __forceinline__ Real largest_bias(int64_t begin, int64_t end) const {
    Real found = minus_infinity<Real>();
    for (int64_t key = begin + tile::lane(); key < end; key += kWarpSize) {
      found = fmax(found, load_bias<Real>(p.score_mod.bias, {coord.sequence.batch, coord.head, query, key}));
    }
    return maximum_over_warp(found);
  }

  __device__ __forceinline__ auto rows_of(const attention::MatrixView& view, int64_t first, int64_t columns) const {
    return Keys::template rows<Element>(view, p, {coord.sequence, coord.key_head}, first, static_cast<int>(columns));
  }

  __device__ __forceinline__ void finish(const ColumnSlice& slice) {
    const RowPlace place = coord.query_row(query);
    out.multiply(state.output_factor());
    store_columns<Element>(p.out, place, out, slice, p.head_dim_v);
    if (slice.begin != 0 || tile::lane() != 0) return;
    attention::LogSumExp<Real> lse = state.log_sum_exp();
    if constexpr (kSubtractsBias) {
      lse = lse.plus(subtracted);
      largest += subtracted;
    }
    *p.lse.template at<Real>(place.batch, place.head, place.row) = lse.value;
    if (p.lse_residual.present()) *p.lse_residual.template at<Real>(place.batch, place.head, place.row) = lse.residual;
    if constexpr (kHasRowMax) {
      if (!p.row_max.present()) return;
      *p.row_max.template at<Real>(place.batch, place.head, place.row) = state.l != state.l ? state.l : largest;
    }
  }
};

template <class Element>
struct QueryGradientRow {
  using Real = tile::Accumulate<Element>;

  const attention::BackwardParams& p;
  const HeadRows coord;
  int64_t query;
  ColumnSums<Real> dq;

  __device__ __forceinline__ void run(const ColumnSlice& slice) {
    const attention::Interval seen = p.visibility.keys_of(query, coord.sequence);
    dq.clear();
#pragma unroll 1
    for (int64_t first = seen.begin; first < seen.end && !dq.all_nan(slice.count(p.head_dim_qk)); first += kWarpSize) {
      const PairGradient<Real> gradient = gradients_of_query<Element>(p, coord, query, first);
      add_rows(dq, rows_from<Element>(p.k, coord.key_row(first), p.head_dim_qk).slice(slice), gradient.dproduct);
    }
    dq.multiply(static_cast<Real>(p.score_mod.scale));
    store_columns<Element>(p.dq, coord.query_row(query), dq, slice, p.head_dim_qk);
  }
};

template <class Element>
struct KeyGradientRow {
  using Real = tile::Accumulate<Element>;

  const attention::BackwardParams& p;
  const attention::Sequence& sequence;
  int64_t key_head;
  int64_t key;
  ColumnSums<Real> dk;
  ColumnSums<Real> dv;

  __device__ __forceinline__ void run(const ColumnSlice& slice) {
    dk.clear();
    dv.clear();
    add_queries(slice);
    dk.multiply(static_cast<Real>(p.score_mod.scale));
    const RowPlace place = {sequence.batch, key_head, sequence.key_begin + key};
    if (p.dk.data != nullptr) store_columns<Element>(p.dk, place, dk, slice, p.head_dim_qk);
    if (p.dv.data != nullptr) store_columns<Element>(p.dv, place, dv, slice, p.head_dim_v);
  }

 private:
  // Iterates over the query heads of the KV group, and over the queries of each in ascending order.
  __device__ __forceinline__ void add_queries(const ColumnSlice& slice) {
    const attention::Interval seen = p.visibility.queries_of(key, sequence);
    const int64_t group = p.queries_per_key_head();
#pragma unroll 1
    for (int64_t head = key_head * group; head < (key_head + 1) * group; ++head) {
      const HeadRows coord = {sequence, head, key_head};
#pragma unroll 1
      for (int64_t first = seen.begin; first < seen.end; first += kWarpSize) {
        const bool dk_done = p.dk.data == nullptr || dk.all_nan(slice.count(p.head_dim_qk));
        const bool dv_done = p.dv.data == nullptr || dv.all_nan(slice.count(p.head_dim_v));
        if (dk_done && dv_done) return;
        const PairGradient<Real> gradient = gradients_of_key<Element>(p, coord, first, key);
        const RowPlace row = coord.query_row(first);
        if (!dk_done) add_rows(dk, rows_from<Element>(p.q, row, p.head_dim_qk).slice(slice), gradient.dproduct);
        if (!dv_done) add_rows(dv, rows_from<Element>(p.dout, row, p.head_dim_v).slice(slice), gradient.weight);
      }
    }
  }
};

// The three functions are inlined; `query` and `key` are positions inside the sequence.
template <class Element, class Keys = OwnKeys, class Params>
__device__ __forceinline__ void compute_forward_row(const Params& p, const HeadRows& coord, int64_t query,
                                                    const ColumnRange& columns) {
  for_each_slice<tile::Accumulate<Element>>(columns, p.head_dim_v, [&](const ColumnSlice& slice) {
    ForwardRow<Element, Keys, Params>{p, coord, query}.run(slice);
  });
}

template <class Element>
__device__ __forceinline__ void compute_dq_row(const attention::BackwardParams& p, const HeadRows& coord, int64_t query,
                                               const ColumnRange& columns) {
  if (p.dq.data == nullptr) return;
  for_each_slice<tile::Accumulate<Element>>(columns, p.head_dim_qk, [&](const ColumnSlice& slice) {
    QueryGradientRow<Element>{p, coord, query}.run(slice);
  });
}

template <class Element>
__device__ __forceinline__ void compute_dkdv_row(const attention::BackwardParams& p,
                                                 const attention::Sequence& sequence, int64_t key_head, int64_t key,
                                                 const ColumnRange& columns) {
  const int64_t width = max(p.head_dim_qk, p.head_dim_v);
  for_each_slice<tile::Accumulate<Element>>(columns, width, [&](const ColumnSlice& slice) {
    KeyGradientRow<Element>{p, sequence, key_head, key}.run(slice);
  });
}

}  // namespace flash_attn_ext::common
