// The epilogue of a tile of queries: O / l and the LSE of a warp's 16 rows, and which rows are recomputed.
#pragma once

#include "attention/key_bias.h"
#include "kernels/common/rows/attention_rows.cuh"
#include "kernels/sm90/forward/row_softmax.cuh"
#include "kernels/sm90/forward/single_tile/traits.h"
#include "kernels/sm90/staged_rows.cuh"

namespace flash_attn_ext::sm90 {

// The index of the calling warp among those of the consumers.
__device__ __forceinline__ int result_warp() { return tile::warp() - tile::kWarpgroupSize / tile::kWarpSize; }

// The calling warp's first row in one of a work tile's tiles of queries.
__device__ __forceinline__ int own_row(int query_tile) {
  return query_tile * tile::kWarpgroupRows + tile::warp() % 4 * 16;
}

__device__ __forceinline__ uint8_t* repair_flag(const SingleTileArguments& args, const WorkTile& work_tile,
                                                int query_tile) {
  return args.nan_flags + (int64_t{work_tile.index} * args.query_tiles + query_tile) * 4 + tile::warp() % 4;
}

// Where a warp's rows go. Copied from the work tile, whose stage is released before they are stored.
struct ResultRows {
  int batch;
  int head;
  int row;    // in the tensors
  int count;  // the rows that exist; may exceed 16
  uint8_t* repair_flag;
};

__device__ __forceinline__ ResultRows result_rows(const SingleTileArguments& args, const WorkTile& work_tile,
                                                  int query_tile) {
  const attention::Sequence& sequence = work_tile.coord.sequence;
  const int first = work_tile.first_query + own_row(query_tile);
  return {.batch = static_cast<int>(sequence.batch),
          .head = static_cast<int>(work_tile.coord.head),
          .row = static_cast<int>(sequence.query_begin) + first,
          .count = static_cast<int>(sequence.num_queries) - first,
          .repair_flag = repair_flag(args, work_tile, query_tile)};
}

// Whether a row has seen keys, and its maximum is farther from 0 than kMostScore.
__device__ __forceinline__ bool is_too_large(float m, float scale) {
  return m != -INFINITY && fabsf(m * scale) > attention::kMostScore;
}

// Returns whether the warp's rows are repaired, and why.
template <class Traits>
__device__ __forceinline__ Repair store_result(const SingleTileArguments& args, const ResultRows& rows,
                                               typename Traits::Output& out, const RowSoftmax<false>& softmax,
                                               typename Traits::OutTile& staging) {
  using Element = typename Traits::Element;
  const attention::ForwardParams& p = args.params;
  const auto scale = static_cast<float>(p.score_mod.scale);
  const int own = tile::lane() % 4;  // the thread of a quad that writes the LSE of this row
  attention::SoftmaxState<float> own_state;
  float own_max = 0.0f;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    attention::SoftmaxState<float> state = softmax.state_of(r, scale);
    if (r == own) own_max = state.m;
    float factor = p.sink == nullptr ? 1.0f : state.add_sink(static_cast<const float*>(p.sink)[rows.head]);
    factor *= state.l == 0.0f ? 0.0f : ptx::reciprocal(state.l);
    out.scale_row(r, factor);
    if (r == own) own_state = state;
  }
  const int own_row = Traits::Output::row(own);
  if (own < 2 && own_row < rows.count) {
    const attention::LogSumExp<float> result = own_state.log_sum_exp([](float x) { return ptx::log(x); });
    *p.lse.at<float>(rows.batch, rows.head, rows.row + own_row) = result.value;
    if (Traits::kKeyBias && p.lse_residual.present()) {
      *p.lse_residual.at<float>(rows.batch, rows.head, rows.row + own_row) = result.residual;
    }
    if (p.row_max.present()) *p.row_max.at<float>(rows.batch, rows.head, rows.row + own_row) = own_max;
  }
  const OutputRows<Element> target = {.data = p.out.row<Element>(rows.batch, rows.head, rows.row),
                                      .row_stride = p.out.row_stride,
                                      .column_stride = p.out.column_stride,
                                      .rows = rows.count,
                                      .columns = static_cast<int>(p.head_dim_v)};
  if (tile::lane() == 0) ptx::wait_until_read();  // the staging of the preceding tile
  __syncwarp();
  const ptx::TmaCoordinate at = {.column = 0, .row = rows.row, .head = rows.head, .batch = rows.batch};
  // In a packed batch the rows behind a sequence are those of the next one, on which nothing here may depend.
  const auto is_inexact_row = [&](int r) {
    return Traits::Output::row(r) < rows.count && is_too_large(softmax.m[r], scale);
  };
  const bool is_not_finite = tma_store_rows(target, args.out, at, out, staging, tile::warp() % 4 * 16);
  if (__any_sync(0xFFFFFFFFu, is_not_finite)) return Repair::kNotFinite;
  if (!Traits::kKeyBias || !p.score_mod.bias.present()) return Repair::kNone;
  const bool is_inexact = is_inexact_row(0) || is_inexact_row(1);
  return __any_sync(0xFFFFFFFFu, is_inexact) ? Repair::kInexactScores : Repair::kNone;
}

// Rows with a non-finite result are recomputed without tensor cores, since the result may be 0 times a NaN or infinity
// of a key that the row does not attend to. With a bias, so are rows of large scores (kMostScore).

// Recomputes the calling warp's flagged rows of all work tiles that its CTA had.
template <class Traits>
__device__ __forceinline__ void repair_flagged(const SingleTileArguments& args, int warpgroup) {
  const attention::ForwardParams& p = args.params;
  int query_tile = warpgroup;
  WorkTile work_tile;
  for_each_static_work_tile(args.schedule.num_blocks, [&](int index) {
    locate(work_tile, args, index);
    const attention::Sequence sequence =
        p.sequences.at(work_tile.coord.sequence.batch);  // including the keys that a mask hides
    const int first_query =
        work_tile.first_query + static_cast<int>(work_tile.coord.sequence.query_begin - sequence.query_begin);
    const common::HeadRows head = common::head_rows(p, sequence, work_tile.coord.head);
#pragma unroll 1
    for (; query_tile < work_tile.query_tiles; query_tile += Traits::kConfig.warpgroups) {
      const auto repair = static_cast<Repair>(*repair_flag(args, work_tile, query_tile));
      if (repair == Repair::kNone) continue;
      const int first = first_query + own_row(query_tile);
      const int end = min(first + 16, static_cast<int>(sequence.num_queries));
      uint32_t rows = 0xFFFFFFFFu;  // a bit for each one that is recomputed
      if constexpr (Traits::kKeyBias) {
        const ScoreRange range = {.maximum = 0.0f, .most_distance = attention::kMostScore};
        if (repair == Repair::kInexactScores)
          rows = repair_statistics<typename Traits::Element>(p, p.row_max, head, {first, end}, range);
      }
#pragma unroll 1
      for (int query = first; query < end; ++query, rows >>= 1) {
        if (rows % 2 != 0) common::compute_forward_row<typename Traits::Element>(p, head, query, {});
      }
    }
    query_tile -= work_tile.query_tiles;
  });
}

}  // namespace flash_attn_ext::sm90
