// One row of the tangents of O and of the LSE, computed by one warp without tensor cores, for scores that are only
// scaled (kernels/sm80/tangents/tangents.cuh has the equations). As in attention_rows.cuh, keys that are not attended
// to, or have a weight of exactly 0, are not read.
#pragma once

#include "kernels/common/rows/attention_rows.cuh"

namespace flash_attn_ext::common {

// exp(sink - lse) * sink': the sink's term of the tangent of the LSE.
template <class Real>
__device__ __forceinline__ Real sink_part(const attention::TangentParams& p, int64_t head, Real lse) {
  const Real sink = static_cast<const Real*>(p.sink)[head];
  if (sink == minus_infinity<Real>()) return Real(0);
  return exponential(sink - lse) * static_cast<const Real*>(p.sink_tangent)[head];
}

template <class Element>
struct TangentRow {
  using Real = tile::Accumulate<Element>;

  const attention::TangentParams& p;
  const HeadRows coord;
  int64_t query;
  Real lse;
  Real lse_tangent;
  ColumnSums<Real> out_tangent;

  __device__ __forceinline__ void run(const ColumnSlice& slice) {
    const RowPlace place = coord.query_row(query);
    const attention::Interval seen = p.visibility.keys_of(query, coord.sequence);
    lse = *p.lse.at<const Real>(place.batch, place.head, place.row);
    lse_tangent = Real(0);
    out_tangent.clear();
    if (lse != minus_infinity<Real>()) {
#pragma unroll 1
      for (int64_t first = seen.begin; first < seen.end; first += kWarpSize) add_keys(slice, first, seen.end);
    }
    if (p.sink_tangent != nullptr) lse_tangent += sink_part(p, coord.head, lse);
    add_rows(out_tangent, rows_from<Element>(p.out, place, p.head_dim_v).slice(slice),
             tile::lane() == 0 ? -lse_tangent : Real(0));
    store_columns<Element>(p.out_tangent, place, out_tangent, slice, p.head_dim_v);
    if (slice.begin == 0 && tile::lane() == 0) {
      *p.lse_tangent.at<Real>(place.batch, place.head, place.row) = lse_tangent;
    }
  }

 private:
  // Adds keys [first, first + 32), as far as they come before `end`.
  __device__ __forceinline__ void add_keys(const ColumnSlice& slice, int64_t first, int64_t end) {
    const unsigned visible = __ballot_sync(kAllLanes, first + tile::lane() < end);
    const auto scale = static_cast<Real>(p.score_mod.scale);
    const Real score = scale * product(p.q, p.k, first, visible);
    const Real weight = visible >> tile::lane() & 1u ? exponential(score - lse) : Real(0);
    const unsigned weighted = __ballot_sync(kAllLanes, weight != Real(0));
    if (weighted == 0) return;
    const Real tangent = product(p.q_tangent, p.k, first, weighted) + product(p.q, p.k_tangent, first, weighted);
    const Real weighted_tangent = weight != Real(0) ? weight * scale * tangent : Real(0);
    lse_tangent += sum_over_warp(weighted_tangent);
    add(slice, p.v, first, weighted_tangent);
    add(slice, p.v_tangent, first, weight);
  }

  // The products of the query's row of `queries` and the chosen ones of 32 rows of `keys`; 0 where either is absent.
  __device__ __forceinline__ Real product(const attention::MatrixView& queries, const attention::MatrixView& keys,
                                          int64_t first, unsigned chosen) const {
    if (queries.data == nullptr || keys.data == nullptr) return Real(0);
    return multiply_rows(rows_from<Element>(queries, coord.query_row(query), p.head_dim_qk),
                         rows_from<Element>(keys, coord.key_row(first), p.head_dim_qk), chosen);
  }

  __device__ __forceinline__ void add(const ColumnSlice& slice, const attention::MatrixView& values, int64_t first,
                                      Real weight) {
    if (values.data == nullptr) return;
    add_rows(out_tangent, rows_from<Element>(values, coord.key_row(first), p.head_dim_v).slice(slice), weight);
  }
};

template <class Element>
__device__ __forceinline__ void compute_tangent_row(const attention::TangentParams& p, const HeadRows& coord,
                                                    int64_t query) {
  for_each_slice<tile::Accumulate<Element>>({}, p.head_dim_v, [&](const ColumnSlice& slice) {
    TangentRow<Element>{p, coord, query}.run(slice);
  });
}

}  // namespace flash_attn_ext::common
