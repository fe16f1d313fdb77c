// dBias from dS that is computed again: sums over what the bias is broadcast along.
//
// Grid: one CTA per tile of the result. Along a dimension that the result has, a CTA owns one index (a batch entry, a
// head) or one tile of queries or keys. Along any other dimension it loops over all of them in order. So CTAs never
// share an element of the result, every sum has one order, and each element is written once. A CTA's partial sums stay
// in registers, one per element of a tile, until the loops end.
// Shared memory: that of recomputed_scores.cuh, and in the same place the sums at the end.
#pragma once

#include "attention/division.h"
#include "kernels/epilogue/store_dbias.cuh"
#include "kernels/sm80/backward/recomputed_scores.cuh"
#include "kernels/sm80/launch.cuh"

namespace flash_attn_ext::sm80 {

// One dimension of the grid: split into steps, or looped over by each CTA.
struct DscoreAxis {
  bool split;
  int64_t length;
  int64_t step;

  __host__ __device__ int64_t count() const { return split ? attention::ceil_div(length, step) : 1; }
  __device__ __forceinline__ attention::Interval range(int64_t index) const {
    if (!split) return {0, length};
    return {index * step, min((index + 1) * step, length)};
  }
};

struct DscoreParams {
  BackwardParams p;
  DscoreAxis batches;
  DscoreAxis heads;
  DscoreAxis queries;
  DscoreAxis keys;

  int64_t num_blocks() const { return batches.count() * heads.count() * queries.count() * keys.count(); }
};

// What a CTA sums over.
struct DscoreRanges {
  attention::Interval batches;
  attention::Interval heads;
  attention::Interval queries;
  attention::Interval keys;
};

// A tile of sums in registers.
template <class ElementType, int kHeadDim>
struct DscoreTileSums {
  using Element = ElementType;
  using Recomputed = RecomputedScores<Element, kHeadDim>;
  using Scores = typename Recomputed::Scores;
  static constexpr TileShape kTile = Recomputed::kTile;
  static constexpr int kThreads = Recomputed::kThreads;
  static constexpr int kRowsPerWarp = Recomputed::kRowsPerWarp;

  union Shared {
    typename Recomputed::Operands operands;
    float sums[kTile.queries][kTile.keys];
  };

  const BackwardParams& p;
  Shared& shared;
  Recomputed recomputed;
  Scores sums;

  __device__ __forceinline__ DscoreTileSums(const BackwardParams& params, Shared& memory)
      : p(params), shared(memory), recomputed{params, memory.operands} {}

  // Rows past the end are zero-padded, but see keys: 0 times a NaN must not reach a sum over rows.
  __device__ __forceinline__ void add(const typename Recomputed::Tile& tile) {
    const Scores dscores = recomputed.template compute</*kSubtractsDelta=*/true>(tile).dscores;
    for_each_element<Scores>([&](int r, int row, int j, int e, int) {
      if (tile.where.first_row + row < tile.where.coord.sequence.num_queries) sums.at(r, j, e) += dscores.at(r, j, e);
    });
  }

  // Moves the sums to shared memory.
  __device__ __forceinline__ void share_sums() {
    __syncthreads();  // no warp reads the preceding tile any more
#pragma unroll
    for (int r = 0; r < Scores::kThreadRows; ++r) {
      float* row = shared.sums[tile::warp() * kRowsPerWarp + Scores::row(r)];
#pragma unroll
      for (int j = 0; j < Scores::kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) row[Scores::column(j, e)] = sums.at(r, j, e);
      }
    }
    __syncthreads();
  }
};

template <class Element, int kHeadDim>
struct DscoreSumsKernel : DscoreTileSums<Element, kHeadDim> {
  using Base = DscoreTileSums<Element, kHeadDim>;
  using Base::kThreads;
  using Base::kTile;
  using Base::p;
  using Base::shared;
  using Base::sums;
  using typename Base::Shared;

  __device__ __forceinline__ DscoreSumsKernel(const DscoreParams& params, Shared& memory) : Base(params.p, memory) {}

  static DscoreParams make_params(const BackwardParams& p) {
    const attention::BiasGradient& g = p.dbias;
    return {.p = p,
            .batches = {g.per_batch, p.batch, 1},
            .heads = {g.per_head, p.num_heads_q, 1},
            .queries = {g.per_query, p.sequences.max_seqlen_q, kTile.queries},
            .keys = {true, p.sequences.max_seqlen_k, kTile.keys}};
  }

  __device__ __forceinline__ void run(const DscoreRanges& ranges) {
    sums.clear();
    for (int64_t batch = ranges.batches.begin; batch < ranges.batches.end; ++batch) {
      const attention::Sequence sequence = p.sequences.at(batch);
      for (int64_t head = ranges.heads.begin; head < ranges.heads.end; ++head) {
        this->recomputed.for_each_tile({sequence, head, head / p.queries_per_key_head()}, ranges.queries, ranges.keys,
                                       [&](const auto& tile) { this->add(tile); });
      }
    }
    sum_tile(ranges);
  }

 private:
  // Sums over the tile's rows where the result has only one of them, in order, and writes the result.
  __device__ __forceinline__ void sum_tile(const DscoreRanges& ranges) {
    this->share_sums();
    const bool per_query = p.dbias.per_query;
    const int rows = per_query ? kTile.queries : 1;
    for (int index = static_cast<int>(threadIdx.x); index < rows * kTile.keys; index += kThreads) {
      const int row = index / kTile.keys;
      const int column = index % kTile.keys;
      float sum = shared.sums[row][column];
      for (int i = 1; i < (per_query ? 1 : kTile.queries); ++i) sum += shared.sums[i][column];
      store(ranges, row, column, sum);
    }
  }

  __device__ __forceinline__ void store(const DscoreRanges& ranges, int row, int column, float sum) const {
    const int64_t query = ranges.queries.begin + row;
    const int64_t key = ranges.keys.begin + column;
    if (query >= p.sequences.max_seqlen_q || key >= p.sequences.max_seqlen_k) return;
    const attention::BiasGradient& g = p.dbias;
    store_dbias<Element>(g,
                         ranges.batches.begin * g.batch_stride + ranges.heads.begin * g.head_stride +
                             query * g.query_stride + key * g.key_stride,
                         sum);
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads) dscore_sums_kernel(const __grid_constant__ DscoreParams params) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  int64_t index = blockIdx.x;
  const auto next_range = [&](const DscoreAxis& axis) {
    const int64_t count = axis.count();
    const int64_t rest = index / count;
    const attention::Interval range = axis.range(index - rest * count);
    index = rest;
    return range;
  };
  DscoreRanges ranges;
  ranges.keys = next_range(params.keys);
  ranges.queries = next_range(params.queries);
  ranges.heads = next_range(params.heads);
  ranges.batches = next_range(params.batches);
  Kernel kernel(params, *reinterpret_cast<typename Kernel::Shared*>(shared_memory));
  kernel.run(ranges);
}

template <class Element>
cudaError_t dscore_sums(const BackwardParams& p, const BackwardPlan& plan, cudaStream_t stream) {
  return with_dscore_head_dim<Element>(plan.dscore_head_dim, [&](auto head_dim) {
    using Kernel = DscoreSumsKernel<Element, head_dim()>;
    const DscoreParams params = Kernel::make_params(p);
    return launch<Kernel>(dscore_sums_kernel<Kernel>, params, params.num_blocks(), stream);
  });
}

}  // namespace flash_attn_ext::sm80
