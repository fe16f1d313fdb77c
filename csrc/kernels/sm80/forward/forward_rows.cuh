// The online softmax and the epilogue of a warp's rows in the forward pass: P, O, running maximum and sum.
#pragma once

#include "kernels/epilogue/store_rows.cuh"
#include "kernels/score/score_tile.cuh"
#include "kernels/score/softmax.cuh"
#include "kernels/sm80/sm80_kernels.h"

namespace flash_attn_ext::sm80 {

template <class Traits>
struct ForwardRows {
  using Element = typename Traits::Element;
  static constexpr TileShape kTile = Traits::kConfig.tile;
  static constexpr int kRowsPerWarp = kTile.queries / kTile.warps;
  // Few tiles raise a row maximum. Where O fills most registers, a vote on whether one did is faster than rescaling O
  // by 1. There an approximate reciprocal makes ptxas spill; elsewhere it shortens the epilogue.
  static constexpr bool kFillsRegisters = kRowsPerWarp == 32 && kTile.columns > 64;

  using Output = tile::Accumulator<kRowsPerWarp / 16, kTile.columns / 8>;

  const ForwardParams& p;
  Output out;
  OnlineSoftmax<Output::kThreadRows> running;

  __device__ __forceinline__ void clear() {
    out.clear();
    running.clear();
  }

  __device__ __forceinline__ bool folds_scale() const { return !Traits::kHasBiasMask || p.score_mod.only_scales(); }

  __device__ __forceinline__ bool drops() const {
    return Traits::kConfig.score == ScoreMode::kDropout || (Traits::kGeneric && p.dropout.enabled());
  }

  // scores -> P; updates m, l and O.
  template <class Scores>
  __device__ __forceinline__ void softmax(Scores& scores) {
    const bool folded = folds_scale();
    running.template update<kFillsRegisters>(
        scores, out, {folded, folded ? static_cast<float>(p.score_mod.scale) * kLog2e : kLog2e});
  }

  // The epilogue: O / l and the LSE of the warp's rows. staging: a tile whose rows [first_row, ...) belong to this warp
  // only.
  template <class Tile>
  __device__ __forceinline__ void finish(const HeadCoord& coord, int64_t first_query, int first_column, Tile& staging) {
    const float scale = folds_scale() ? static_cast<float>(p.score_mod.scale) : 1.0f;
    const int first_row = tile::warp() * kRowsPerWarp;  // the warp's first row of the tile
    const int64_t query = first_query + first_row;
    const int rows = static_cast<int>(min(coord.sequence.num_queries - query, int64_t{kRowsPerWarp}));
    const int64_t row = coord.sequence.query_begin + query;
    // Each of the four lanes that share rows writes the LSE of one of them.
    const int own = tile::lane() % 4;
    attention::SoftmaxState<float> own_state;
    float own_max = 0.0f;
#pragma unroll
    for (int r = 0; r < Output::kThreadRows; ++r) {
      attention::SoftmaxState<float> state = running.state(r, scale);
      if (r == own) own_max = state.m;
      float factor = p.sink == nullptr ? 1.0f : state.add_sink(static_cast<const float*>(p.sink)[coord.head]);
      factor *= kFillsRegisters ? state.output_factor() : state.l == 0.0f ? 0.0f : ptx::reciprocal(state.l);
      if (drops()) factor *= static_cast<float>(p.dropout.rescale);
      out.scale_row(r, factor);
      if (r == own) own_state = state;
    }
    const int own_row = 8 * own + tile::lane() / 4;
    if (own < Output::kThreadRows && own_row < rows && first_column == 0) {
      const attention::LogSumExp<float> result = own_state.log_sum_exp([](float x) { return ptx::log(x); });
      *p.lse.at<float>(coord.sequence.batch, coord.head, row + own_row) = result.value;
      if (p.lse_residual.present()) {
        *p.lse_residual.at<float>(coord.sequence.batch, coord.head, row + own_row) = result.residual;
      }
      if (p.row_max.present()) *p.row_max.at<float>(coord.sequence.batch, coord.head, row + own_row) = own_max;
    }
    Element* target = p.out.row<Element>(coord.sequence.batch, coord.head, row) + first_column * p.out.column_stride;
    store_rows<Element>({.data = target,
                         .row_stride = p.out.row_stride,
                         .column_stride = p.out.column_stride,
                         .rows = rows,
                         .columns = static_cast<int>(p.head_dim_v) - first_column},
                        out, staging, first_row);
  }
};

}  // namespace flash_attn_ext::sm80
