// Computes the exact delta, rowsum(P dP) - dlse, which reads no rounded O, and from it the gradient of ALiBi slopes.
// The error of a rounded O in delta would not cancel in that gradient. P and dP are computed again.
//
//   d slope = sum over keys of P (dP - delta) d score / d slope
//
// Grid: one CTA for each tile of queries of each head. It loops over keys in order, and keeps its rows' sums in
// registers. So every sum has one order, and is written once.
#pragma once

#include "attention/division.h"
#include "kernels/sm80/backward/recomputed_scores.cuh"
#include "kernels/sm80/launch.cuh"

namespace flash_attn_ext::sm80 {

template <class Element, int kHeadDim>
struct ExactDeltaKernel {
  using Scores = RecomputedScores<Element, kHeadDim>;
  using Tile = typename Scores::Tile;
  using Accumulator = typename Scores::Scores;
  static constexpr int kThreads = Scores::kThreads;
  static constexpr int kQueries = Scores::kTile.queries;

  union Shared {
    typename Scores::Operands operands;
    float slopes[kQueries];
  };

  // Of a row.
  struct Sums {
    float products = 0.0f;           // P dP
    float derivatives = 0.0f;        // P times d score / d slope
    float weighted_products = 0.0f;  // P dP times d score / d slope
  };

  const BackwardParams& p;
  Shared& shared;
  Scores scores;
  Sums sums[Accumulator::kThreadRows] = {};

  __device__ __forceinline__ ExactDeltaKernel(const BackwardParams& params, Shared& memory)
      : p(params), shared(memory), scores{params, memory.operands} {}

  static int64_t tiles_of_head(const BackwardParams& p) {
    return attention::ceil_div(p.sequences.max_seqlen_q, kQueries);
  }

  __device__ __forceinline__ void run(int64_t batch, int64_t head, int64_t tile) {
    const attention::Sequence sequence = p.sequences.at(batch);
    const HeadCoord coord = {sequence, head, head / p.queries_per_key_head()};
    const int64_t first = tile * kQueries;
    scores.for_each_tile(coord, {first, first + kQueries}, {0, p.sequences.max_seqlen_k},
                         [&](const Tile& at) { add(scores.template compute<false>(at), at.where); });
    if (p.dalibi_slopes != nullptr) __syncthreads();  // no warp reads operands any more
#pragma unroll
    for (int r = 0; r < Accumulator::kThreadRows; ++r) {
      const int row = tile::warp() * Scores::kRowsPerWarp + Accumulator::row(r);
      finish_row(sequence, head, first, row, sums[r]);
    }
    if (p.dalibi_slopes == nullptr) return;
    __syncthreads();
    if (threadIdx.x == 0) store_slope();
  }

 private:
  __device__ __forceinline__ void add(const typename Scores::Computed& computed, const typename Scores::Where& where) {
    for_each_element<Accumulator>(
        [&](int r, int, int j, int e, int) { sums[r].products += computed.dscores.at(r, j, e); });
    if (p.dalibi_slopes == nullptr) return;
    // Key minus diagonal key of the tile's first element. Differences within the tile are small numbers.
    const auto origin =
        static_cast<float>(where.key(0, 0) - where.query(0, 0) - p.visibility.diagonal(where.coord.sequence));
    for_each_element<Accumulator>([&](int r, int row, int j, int e, int column) {
      const float derivative = attention::alibi_derivative(origin + static_cast<float>(column - row));
      sums[r].derivatives += computed.weights.at(r, j, e) * derivative;
      sums[r].weighted_products += computed.dscores.at(r, j, e) * derivative;
    });
  }

  __device__ __forceinline__ void finish_row(const attention::Sequence& sequence, int64_t head, int64_t first, int row,
                                             const Sums& of_thread) {
    const Sums of_row = {tile::quad_sum(of_thread.products), tile::quad_sum(of_thread.derivatives),
                         tile::quad_sum(of_thread.weighted_products)};
    if (tile::lane() % 4 != 0) return;
    float slope = 0.0f;
    // Rows past the end are zero-padded, but see keys, and may hold NaN.
    if (first + row < sequence.num_queries) {
      const int64_t query = sequence.query_begin + first + row;
      const float dlse = p.dlse.present() ? *p.dlse.at<const float>(sequence.batch, head, query) : 0.0f;
      const float delta = of_row.products - dlse;
      *p.delta.at<float>(sequence.batch, head, query) = delta;
      // The dlse of a row without keys may be anything.
      const bool has_weights = of_row.derivatives != 0.0f;
      slope = has_weights ? fmaf(-delta, of_row.derivatives, of_row.weighted_products) : of_row.weighted_products;
    }
    if (p.dalibi_slopes != nullptr) shared.slopes[row] = slope;
  }

  // Writes the tile's partial sum.
  __device__ __forceinline__ void store_slope() const {
    float sum = shared.slopes[0];
    for (int row = 1; row < kQueries; ++row) sum += shared.slopes[row];
    static_cast<float*>(p.alibi_partials.data)[blockIdx.x] = sum;
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads)
    exact_delta_kernel(const __grid_constant__ BackwardParams p, int64_t tiles) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const int64_t pair = blockIdx.x / tiles;
  const int64_t batch = pair / p.num_heads_q;
  Kernel(p, *reinterpret_cast<typename Kernel::Shared*>(shared_memory))
      .run(batch, pair - batch * p.num_heads_q, blockIdx.x - pair * tiles);
}

template <class Element>
cudaError_t exact_delta(const BackwardParams& p, const BackwardPlan& plan, cudaStream_t stream) {
  return with_dscore_head_dim<Element>(plan.dscore_head_dim, [&](auto head_dim) {
    using Kernel = ExactDeltaKernel<Element, head_dim()>;
    const int64_t tiles = Kernel::tiles_of_head(p);
    static_assert(sizeof(typename Kernel::Shared) <= kSharedBytes);
    return common::launch_blocks<Kernel>(exact_delta_kernel<Kernel>, p.batch * p.num_heads_q * tiles, stream, p, tiles);
  });
}

}  // namespace flash_attn_ext::sm80
