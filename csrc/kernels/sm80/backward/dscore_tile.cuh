// dS of one tile, recomputed on its own: what the gradients of biases and ALiBi slopes, and delta, are sums of.
#pragma once

#include "kernels/score/mask_coverage.cuh"
#include "kernels/score/score_gradient.cuh"
#include "kernels/sm80/backward/params.h"
#include "kernels/sm80/staging.cuh"
#include "kernels/tile_config.h"
#include "tile/sm80/copy_rows.h"
#include "tile/sm80/gemm.h"

namespace flash_attn_ext::sm80 {

enum class Dscore {
  kWhole,         // P (dP - delta)
  kWithoutDelta,  // P dP, whose sum over keys is delta + dlse
};

template <class Element, int kHeadDim, Dscore kDscore>
struct DscoreTile {
  static constexpr QueryStationaryTile kTile = backward_dq_tile(sizeof(Element), kHeadDim, Variant::kExtended);
  static constexpr int kThreads = kTile.warps * kWarpSize;
  static constexpr int kRowsPerWarp = kTile.queries / kTile.warps;

  using Scores = tile::Accumulator<kRowsPerWarp / 16, kTile.keys / 8>;
  using Where = ScoreTile<Rows::kQueries, Scores>;
  using Terms = StagedBiasMask<Element, Where, gradient_stages_bias(sizeof(Element), kHeadDim)>;
  struct Shared {
    tile::SharedTile<Element, kTile.queries, kHeadDim> q;
    tile::SharedTile<Element, kTile.queries, kHeadDim> dout;
    tile::SharedTile<Element, kTile.keys, kHeadDim> k;
    tile::SharedTile<Element, kTile.keys, kHeadDim> v;
    Terms terms[kTile.warps];
  };

  const BackwardParams& p;
  Shared& shared;

  // Calls add(dscore, where) for each tile in the range that has visible scores, queries before keys, in ascending
  // order.
  template <class Add>
  __device__ __forceinline__ void walk(const WorkItem& item, const attention::Interval& query_range,
                                       const attention::Interval& key_range, Add&& add) {
    const int64_t query_end = min(query_range.end, item.sequence.num_queries);
    const int64_t key_end = min(key_range.end, item.sequence.num_keys);
    for (int64_t query = query_range.begin; query < query_end; query += kTile.queries) {
      const attention::Interval queries = {query, min(query + kTile.queries, query_end)};
      for (int64_t key = key_range.begin; key < key_end; key += kTile.keys) {
        const attention::Interval keys = {key, min(key + kTile.keys, key_end)};
        if (p.visibility.coverage(queries, keys, item.sequence) == attention::TileCoverage::kNone) continue;
        const MaskCoverage attended = mask_coverage(p, item, queries, keys);
        if (attended == MaskCoverage::kNone) continue;
        const Where where = {p, item, query + tile::warp() * kRowsPerWarp, key};
        const bool masked = attended == MaskCoverage::kMixed;
        load(where, masked, queries, keys);
        Scores dscore = compute(where, masked);
        add(dscore, where);
      }
    }
  }

 private:
  template <class Tile>
  __device__ __forceinline__ void load_rows(Tile& target, const attention::MatrixView& view, int64_t head_dim,
                                            const Element* first_row, const attention::Interval& rows) {
    tile::copy_rows_async<kThreads>(target, {first_row, view.row_stride, static_cast<int>(head_dim)},
                                    static_cast<int>(rows.end - rows.begin));
  }

  __device__ __forceinline__ void load(const Where& where, bool masked, const attention::Interval& queries,
                                       const attention::Interval& keys) {
    const WorkItem& item = where.item;
    const int64_t batch = item.sequence.batch;
    const int64_t query_row = item.sequence.query_begin + queries.begin;
    const int64_t key_row = item.sequence.key_begin + keys.begin;
    __syncthreads();  // the last tile's readers are done
    stage(shared.terms[tile::warp()], where, masked);
    load_rows(shared.q, p.q, p.head_dim_qk, p.q.row<const Element>(batch, item.head, query_row), queries);
    load_rows(shared.dout, p.dout, p.head_dim_v, p.dout.row<const Element>(batch, item.head, query_row), queries);
    load_rows(shared.k, p.k, p.head_dim_qk, p.k.row<const Element>(batch, item.key_head, key_row), keys);
    load_rows(shared.v, p.v, p.head_dim_v, p.v.row<const Element>(batch, item.key_head, key_row), keys);
    ptx::commit_copies();
    ptx::wait_copies<0>();
    __syncthreads();
  }

  __device__ __forceinline__ Scores compute(const Where& where, bool masked) {
    Scores scores;
    Scores gradients;
    scores.clear();
    gradients.clear();
    tile::multiply_head_dims(scores, shared.q, tile::warp() * kRowsPerWarp, shared.k);
    // Their sum over keys cancels against delta, which knows nothing of cut-off sums.
    tile::multiply_rows<decltype(shared.dout), tile::Sums::kRounded>(gradients, shared.dout,
                                                                     tile::warp() * kRowsPerWarp, shared.v);
    QueryStatistics statistics[Scores::kThreadRows];
#pragma unroll
    for (int r = 0; r < Scores::kThreadRows; ++r) {
      statistics[r] = load_statistics<true>(p, where.item, where.first_row + Scores::row(r));
      if (kDscore == Dscore::kWithoutDelta) statistics[r].delta = 0.0f;
    }
    differentiate<Differentiation<true, true, GradientOf::kScore>>(
        scores, gradients, where, shared.terms[tile::warp()],
        masked, [&](int r, int) -> const auto& { return statistics[r]; });
    // Rows past the end hold zeros, but see keys: 0 times a NaN is not to reach a sum over rows.
    for_each_element<Scores>([&](int r, int row, int j, int e, int) {
      if (where.first_row + row >= where.item.sequence.num_queries) gradients.at(r, j, e) = 0.0f;
    });
    return gradients;
  }
};

}  // namespace flash_attn_ext::sm80
