// dBias: dS summed over the bias's broadcast dimensions, with dS recomputed.
//
// Grid: one block a tile of the bias itself. Along a dimension that the bias has, a block owns one index (a batch
// entry, a head) or one tile of queries or keys; along a broadcast one it walks all of them in order. So blocks never
// share an element of the result, every sum has one order, and each element is written once. The block's own sums stay
// in registers until the end.
#pragma once

#include "kernels/epilogue/store_dbias.cuh"
#include "kernels/sm80/backward/dscore_tile.cuh"

namespace flash_attn_ext::sm80 {

// One dimension of the grid: a bias that has the dimension cuts it into steps, a broadcast one takes it whole.
struct BiasAxis {
  bool split;
  int64_t length;
  int64_t step;

  __host__ __device__ int64_t count() const { return split ? (length + step - 1) / step : 1; }
  __host__ __device__ attention::Interval range(int64_t index) const {
    if (!split) return {0, length};
    return {index * step, length < (index + 1) * step ? length : (index + 1) * step};
  }
};

template <class Element, int kHeadDim>
struct BackwardDbiasKernel {
  using Tile = DscoreTile<Element, kHeadDim, Dscore::kWhole>;
  using Scores = typename Tile::Scores;
  static constexpr QueryStationaryTile kTile = Tile::kTile;
  static constexpr int kThreads = Tile::kThreads;

  union Shared {
    typename Tile::Shared operands;
    float sums[kTile.queries][kTile.keys];
  };

  static __host__ __device__ BiasAxis batches(const BackwardParams& p) { return {p.dbias.per_batch, p.batch, 1}; }
  static __host__ __device__ BiasAxis heads(const BackwardParams& p) { return {p.dbias.per_head, p.num_heads_q, 1}; }
  static __host__ __device__ BiasAxis queries(const BackwardParams& p) {
    return {p.dbias.per_query, p.sequences.max_seqlen_q, kTile.queries};
  }
  static __host__ __device__ BiasAxis keys(const BackwardParams& p) {
    return {p.dbias.per_key, p.sequences.max_seqlen_k, kTile.keys};
  }

  const BackwardParams& p;
  Shared& shared;
  Scores sums;

  __device__ __forceinline__ void run(int64_t index) {
    const attention::Interval key_range = keys(p).range(index % keys(p).count());
    index /= keys(p).count();
    const attention::Interval query_range = queries(p).range(index % queries(p).count());
    index /= queries(p).count();
    const attention::Interval head_range = heads(p).range(index % heads(p).count());
    const attention::Interval batch_range = batches(p).range(index / heads(p).count());
    sums.clear();
    for (int64_t batch = batch_range.begin; batch < batch_range.end; ++batch) {
      const attention::Sequence sequence = p.sequences.at(batch);
      for (int64_t head = head_range.begin; head < head_range.end; ++head) {
        const WorkItem item = {sequence, head, head / p.queries_per_key_head()};
        Tile{p, shared.operands}.walk(item, query_range, key_range, [&](const Scores& dscore, const auto&) {
          for_each_element<Scores>([&](int r, int, int j, int e, int) { sums.at(r, j, e) += dscore.at(r, j, e); });
        });
      }
    }
    store(batch_range.begin, head_range.begin, query_range.begin, key_range.begin);
  }

 private:
  // Sums over rows and columns of the tile where the bias has only one, in order, then the result.
  __device__ __forceinline__ void store(int64_t batch, int64_t head, int64_t first_query, int64_t first_key) {
    __syncthreads();
    for_each_element<Scores>([&](int r, int row, int j, int e, int column) {
      shared.sums[tile::warp() * Tile::kRowsPerWarp + row][column] = sums.at(r, j, e);
    });
    __syncthreads();
    const attention::BiasGradient& g = p.dbias;
    const int rows = g.per_query ? kTile.queries : 1;
    const int columns = g.per_key ? kTile.keys : 1;
    const int64_t first = batch * g.batch_stride + head * g.head_stride;
    for (int index = static_cast<int>(threadIdx.x); index < rows * columns; index += kThreads) {
      const int row = index / columns;
      const int column = index % columns;
      if (first_query + row >= p.sequences.max_seqlen_q || first_key + column >= p.sequences.max_seqlen_k) continue;
      float sum = 0.0f;
      for (int i = row; i < (g.per_query ? row + 1 : kTile.queries); ++i) {
        for (int j = column; j < (g.per_key ? column + 1 : kTile.keys); ++j) sum += shared.sums[i][j];
      }
      store_dbias<Element>(g, first + (first_query + row) * g.query_stride + (first_key + column) * g.key_stride, sum);
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads) backward_dbias_kernel(const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  Kernel kernel = {p, *reinterpret_cast<typename Kernel::Shared*>(shared_memory)};
  kernel.run(blockIdx.x);
}

}  // namespace flash_attn_ext::sm80
