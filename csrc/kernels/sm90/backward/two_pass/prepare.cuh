// Prepares what the first kernel and the GEMM kernels need: delta and the LSE in tiles, and zeros in work counters and
// non-finite flags.
//
// Grid: one CTA for each query tile of each head. Bound: memory, as in common/sums/delta.cu.
#pragma once

#include "attention/division.h"
#include "attention/params.h"
#include "kernels/common/rows/row_products.cuh"
#include "kernels/schedule/materialised_tiles.h"
#include "kernels/score/score_tile.cuh"
#include "kernels/sm90/backward/two_pass/traits.h"
#include "ptx/dependent_launch.h"

namespace flash_attn_ext::sm90 {

// The row statistics that the first kernel reads, in tiles of queries.
//
// A CTA of kThreads threads computes the statistics of a query tile, of which `rows` queries exist. It writes the LSE
// of each query, times log2(e) where `scales_lse`; then delta of each; then the residual that rounding left out of each
// LSE, times log2(e). kLanes neighbouring lanes share a row, and sum it in a butterfly of fixed order.
template <class Element, int kThreads>
struct QueryTileStatistics {
  static constexpr int kQueries = MaterialisedTiles::kRows;
  static constexpr int kLanes = 16;
  static constexpr int kRowStep = kThreads / kLanes;
  static constexpr int kRows = kQueries / kRowStep;  // of a thread

  const attention::BackwardParams& p;
  const attention::Sequence& sequence;
  int head;
  int tile;
  int rows;
  bool scales_lse;

  __device__ __forceinline__ void write(float* statistics) const {
    const int64_t first_row = sequence.query_begin + tile * kQueries;
    const int own = static_cast<int>(threadIdx.x) / kLanes;
    float delta[kRows] = {};
    sum(delta, first_row + own, rows - own);
#pragma unroll
    for (int i = 0; i < kRows; ++i) delta[i] = tile::sum_over_lanes<kLanes>(delta[i]);
    if (threadIdx.x % kLanes != 0) return;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = own + i * kRowStep;
      const bool exists = row < rows;
      float lse = -INFINITY;
      float residual = 0.0f;
      if (exists) {
        const int64_t query = first_row + row;
        lse = *p.lse.at<const float>(sequence.batch, head, query);
        if (p.dlse.present()) delta[i] -= *p.dlse.at<const float>(sequence.batch, head, query);
        *p.delta.at<float>(sequence.batch, head, query) = delta[i];
        if (p.lse_residual.present()) residual = *p.lse_residual.at<const float>(sequence.batch, head, query);
      }
      // P of a query that sees no key vanishes without a branch.
      statistics[row] = lse == -INFINITY ? INFINITY : lse * (scales_lse ? kLog2e : 1.0f);
      statistics[kQueries + row] = exists ? delta[i] : 0.0f;
      statistics[2 * kQueries + row] = residual * kLog2e;
    }
  }

 private:
  // Reads 16 bytes at a time. The plan has checked that rows of O and dO allow it.
  __device__ __forceinline__ void sum(float (&sums)[kRows], int64_t first_row, int num_rows) const {
    using Chunk = common::Chunk<Element>;
    const auto* out = p.out.row<const Element>(sequence.batch, head, first_row);
    const auto* dout = p.dout.row<const Element>(sequence.batch, head, first_row);
    for (int64_t column = threadIdx.x % kLanes * Chunk::kCount; column < p.head_dim_v;
         column += kLanes * Chunk::kCount) {
      common::add_products<Chunk>(sums, {out + column, dout + column, p.out.row_stride, p.dout.row_stride}, num_rows,
                                  [](int i) { return i * kRowStep; });
    }
  }
};

struct TwoPassPrepareGrid {
  attention::Divisor tiles;  // query tiles of the longest sequence
  attention::Divisor heads;
  int64_t blocks;
  int64_t key_flags;
};

inline constexpr int kTwoPassPrepareThreads = 256;

// All threads of the grid call it.
__device__ __forceinline__ void clear_counters_and_flags(const TwoPassArguments& args, const TwoPassPrepareGrid& grid) {
  const TwoPassWorkspace& workspace = args.workspace;
  const int64_t step = grid.blocks * kTwoPassPrepareThreads;
  const int64_t first = int64_t{blockIdx.x} * kTwoPassPrepareThreads + threadIdx.x;
  for (int64_t i = first; i < workspace.num_work_counters; i += step) workspace.work_counters[i] = 0;
  for (int64_t i = first; i < grid.blocks * 4; i += step) workspace.dq_nan_flags[i] = 0;
  for (int64_t i = first; i < grid.key_flags; i += step) workspace.dkdv_nan_flags[i] = 0;
}

template <class Element>
__global__ void __launch_bounds__(kTwoPassPrepareThreads)
    two_pass_prepare_kernel(const __grid_constant__ TwoPassArguments args,
                            const __grid_constant__ TwoPassPrepareGrid grid) {
  ptx::wait_for_kernel_before();
  clear_counters_and_flags(args, grid);
  const attention::BackwardParams& p = args.params;
  const uint32_t index = grid.tiles.quotient(blockIdx.x);
  const auto tile = static_cast<int>(blockIdx.x - index * grid.tiles.divisor);
  const auto batch = static_cast<int>(grid.heads.quotient(index));
  const auto head = static_cast<int>(index - batch * grid.heads.divisor);
  const attention::Sequence sequence = p.sequences.at(batch);
  if (tile >= MaterialisedTiles::num_tiles(sequence.num_queries)) return;
  const int64_t place = int64_t{head} * args.workspace.tiles_of_head + TwoPassWorkspace::first_tile(p, sequence) + tile;
  const auto rows =
      static_cast<int>(min(sequence.num_queries - tile * MaterialisedTiles::kRows, int64_t{MaterialisedTiles::kRows}));
  QueryTileStatistics<Element, kTwoPassPrepareThreads>{p, sequence, head, tile, rows, args.scales_lse}.write(
      args.workspace.statistics_of(place));
}

}  // namespace flash_attn_ext::sm90
