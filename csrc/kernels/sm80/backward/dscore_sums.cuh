// Sums of dS, which is recomputed; DscoreSum names the results. These kernels never use single TF32 products, so that
// no rounded dS is summed.
//
// Grid: one CTA per tile of the result. Along a dimension that the result has, a CTA owns one index (a batch entry, a
// head) or one tile of queries or keys. Along any other dimension it loops over all of them in order. So CTAs never
// share an element of the result, every sum has one order, and each element is written once. A CTA's partial sums stay
// in registers, one per element of a tile, until the loops end.
// Shared memory: Q, dO, K and V of one tile of scores, and at the end the sums. Where it has no room for all, Q and dO
// share a tile, and so do K and V.
#pragma once

#include "attention/division.h"
#include "kernels/config/sm80.h"
#include "kernels/config/sm80_backward.h"
#include "kernels/epilogue/store_dbias.cuh"
#include "kernels/schedule/work_item.h"
#include "kernels/score/mask_coverage.cuh"
#include "kernels/score/score_gradient.cuh"
#include "kernels/score/staging.cuh"
#include "kernels/sm80/launch.cuh"
#include "kernels/sm80/sm80_kernels.h"
#include "tile/sm80/copy_rows.h"
#include "tile/sm80/gemm.h"

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
  DscoreSum sum;
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

template <class Element, int kHeadDim>
struct DscoreSumsKernel {
  static constexpr DqConfig kConfig = kDqConfigs[dscore_sums_row(sizeof(Element), kHeadDim)];
  static constexpr TileShape kTile = kConfig.tile;
  static constexpr bool kSharesTiles = kConfig.one_key_tile;
  static constexpr int kThreads = kTile.warps * kWarpSize;
  static constexpr int kRowsPerWarp = kTile.queries / kTile.warps;

  using Scores = tile::Accumulator<kRowsPerWarp / 16, kTile.keys / 8>;
  using Where = ScoreTile<Rows::kQueries, Scores>;

  using BiasMask = StagedBiasMask<Element, Where, gradient_stages_bias(sizeof(Element), kHeadDim)>;

  using QueryTile = tile::SharedTile<Element, kTile.queries, kHeadDim>;
  using KeyTile = tile::SharedTile<Element, kTile.keys, kHeadDim>;

  struct Operands {
    QueryTile query_tiles[kSharesTiles ? 1 : 2];
    KeyTile key_tiles[kSharesTiles ? 1 : 2];
    BiasMask bias_mask[kTile.warps];

    __device__ __forceinline__ QueryTile& q() { return query_tiles[0]; }
    __device__ __forceinline__ QueryTile& dout() { return query_tiles[kSharesTiles ? 0 : 1]; }
    __device__ __forceinline__ KeyTile& k() { return key_tiles[0]; }
    __device__ __forceinline__ KeyTile& v() { return key_tiles[kSharesTiles ? 0 : 1]; }
  };
  union Shared {
    Operands operands;
    float sums[kTile.queries][kTile.keys];
  };

  const DscoreParams& params;
  const BackwardParams& p;
  Shared& shared;
  Scores sums;

  static DscoreParams make_params(const BackwardParams& p, DscoreSum sum) {
    const attention::BiasGradient& g = p.dbias;
    const bool is_bias = sum == DscoreSum::kBias;
    return {.p = p,
            .sum = sum,
            .batches = {!is_bias || g.per_batch, p.batch, 1},
            .heads = {!is_bias || g.per_head, p.num_heads_q, 1},
            .queries = {!is_bias || g.per_query, p.sequences.max_seqlen_q, kTile.queries},
            .keys = {is_bias, p.sequences.max_seqlen_k, kTile.keys}};
  }

  __device__ __forceinline__ void run(const DscoreRanges& ranges) {
    sums.clear();
    for (int64_t batch = ranges.batches.begin; batch < ranges.batches.end; ++batch) {
      const attention::Sequence sequence = p.sequences.at(batch);
      for (int64_t head = ranges.heads.begin; head < ranges.heads.end; ++head) {
        add_head({sequence, head, head / p.queries_per_key_head()}, ranges);
      }
    }
    sum_tile(ranges);
  }

 protected:
  // Adds the tiles that have visible scores in ascending order, queries in the outer loop.
  __device__ __forceinline__ void add_head(const WorkItem& item, const DscoreRanges& ranges) {
    const int64_t query_end = min(ranges.queries.end, item.sequence.num_queries);
    for (int64_t query = ranges.queries.begin; query < query_end; query += kTile.queries) {
      const attention::Interval queries = {query, min(query + kTile.queries, query_end)};
      const TileRange tiles = tile_range<kTile.keys>(p.visibility.keys_of(queries.begin, item.sequence),
                                                     p.visibility.keys_of(queries.end - 1, item.sequence));
      const int64_t key_end = min(ranges.keys.end, int64_t{tiles.end} * kTile.keys);
      for (int64_t key = max(ranges.keys.begin, int64_t{tiles.begin} * kTile.keys); key < key_end; key += kTile.keys) {
        const attention::Interval keys = {key, min(key + kTile.keys, item.sequence.num_keys)};
        const MaskCoverage attended = mask_coverage(p, item, queries, keys);
        if (attended == MaskCoverage::kNone) continue;
        const Where where = {p, item, query + tile::warp() * kRowsPerWarp, key};
        const bool masked = attended == MaskCoverage::kMixed;
        const TileOfScores rows = {queries, keys};
        load(where, masked, rows);
        add(compute(where, masked, rows), where);
      }
    }
  }

  template <class Tile>
  __device__ __forceinline__ void load_rows(Tile& target, const attention::MatrixView& view, int64_t head_dim,
                                            const Element* first_row, const attention::Interval& rows) {
    tile::copy_rows_async<kThreads>(target, {first_row, view.row_stride, static_cast<int>(head_dim)},
                                    static_cast<int>(rows.end - rows.begin));
  }

  // The queries and keys of a tile.
  struct TileOfScores {
    attention::Interval queries;
    attention::Interval keys;
  };

  // Issues the copies of Q and K, of dO and V, or of all.
  template <bool kQAndK, bool kDoutAndV>
  __device__ __forceinline__ void copy_operands(const WorkItem& item, const TileOfScores& rows) {
    Operands& target = shared.operands;
    const int64_t batch = item.sequence.batch;
    const int64_t query = item.sequence.query_begin + rows.queries.begin;
    const int64_t key = item.sequence.key_begin + rows.keys.begin;
    if (kQAndK)
      load_rows(target.q(), p.q, p.head_dim_qk, p.q.row<const Element>(batch, item.head, query), rows.queries);
    if (kDoutAndV)
      load_rows(target.dout(), p.dout, p.head_dim_v, p.dout.row<const Element>(batch, item.head, query), rows.queries);
    if (kQAndK) load_rows(target.k(), p.k, p.head_dim_qk, p.k.row<const Element>(batch, item.key_head, key), rows.keys);
    if (kDoutAndV)
      load_rows(target.v(), p.v, p.head_dim_v, p.v.row<const Element>(batch, item.key_head, key), rows.keys);
  }
  __device__ __forceinline__ static void await_operands() {
    ptx::commit_copies();
    ptx::wait_copies<0>();
    __syncthreads();
  }

  __device__ __forceinline__ void load(const Where& where, bool masked, const TileOfScores& rows) {
    __syncthreads();  // no warp reads the preceding tile any more
    stage(shared.operands.bias_mask[tile::warp()], where, masked);
    copy_operands<true, !kSharesTiles>(where.item, rows);
    await_operands();
  }

  // Computes dS, or P dP where the sum is delta.
  __device__ __forceinline__ Scores compute(const Where& where, bool masked, const TileOfScores& rows) {
    Operands& operands = shared.operands;
    Scores scores;
    Scores gradients;
    scores.clear();
    gradients.clear();
    tile::multiply_head_dims(scores, operands.q(), tile::warp() * kRowsPerWarp, operands.k());
    if constexpr (kSharesTiles) {
      __syncthreads();  // no warp reads Q and K any more
      copy_operands<false, true>(where.item, rows);
      await_operands();
    }
    // Sums of dS over keys cancel against delta, in which no tensor core has truncated sums.
    tile::multiply_rows<QueryTile, tile::Sums::kRounded>(gradients, operands.dout(), tile::warp() * kRowsPerWarp,
                                                         operands.v());
    QueryStatistics statistics[Scores::kThreadRows];
#pragma unroll
    for (int r = 0; r < Scores::kThreadRows; ++r) {
      statistics[r] = load_statistics<true>(p, where.item, where.first_row + Scores::row(r));
      if (params.sum == DscoreSum::kDelta) statistics[r].delta = 0.0f;
    }
    differentiate<Differentiation<true, true, GradientOf::kScore>>(
        scores, gradients, where, operands.bias_mask[tile::warp()],
        masked, [&](int r, int) -> const auto& { return statistics[r]; });
    return gradients;
  }

  __device__ __forceinline__ void add(Scores dscore, const Where& where) {
    if (params.sum == DscoreSum::kAlibi) {
      const int64_t diagonal = p.visibility.diagonal(where.item.sequence);
      for_each_element<Scores>([&](int r, int row, int j, int e, int column) {
        dscore.at(r, j, e) *=
            static_cast<float>(attention::alibi_derivative(where.query(row, column), where.key(row, column), diagonal));
      });
    }
    // Rows past the end are zero-padded, but see keys: 0 times a NaN must not reach a sum over rows.
    for_each_element<Scores>([&](int r, int row, int j, int e, int) {
      if (where.first_row + row < where.item.sequence.num_queries) sums.at(r, j, e) += dscore.at(r, j, e);
    });
  }

  // Sums over the tile's rows or columns where the result has only one of them, in order, and writes the result.
  __device__ __forceinline__ void sum_tile(const DscoreRanges& ranges) {
    const bool per_query = params.sum == DscoreSum::kDelta || (params.sum == DscoreSum::kBias && p.dbias.per_query);
    const bool per_key = params.keys.split;
    __syncthreads();  // no warp reads the preceding tile any more
#pragma unroll
    for (int r = 0; r < Scores::kThreadRows; ++r) {
      float* row = shared.sums[tile::warp() * kRowsPerWarp + Scores::row(r)];
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < Scores::kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (per_key) row[Scores::column(j, e)] = sums.at(r, j, e);
          sum += sums.at(r, j, e);
        }
      }
      sum = tile::quad_sum(sum);
      if (!per_key && tile::lane() % 4 == 0) row[0] = sum;
    }
    __syncthreads();
    const int rows = per_query ? kTile.queries : 1;
    const int columns = per_key ? kTile.keys : 1;
    for (int index = static_cast<int>(threadIdx.x); index < rows * columns; index += kThreads) {
      const int row = index / columns;
      const int column = index % columns;
      float sum = shared.sums[row][column];
      for (int i = 1; i < (per_query ? 1 : kTile.queries); ++i) sum += shared.sums[i][column];
      store(ranges, row, column, sum);
    }
  }

  __device__ __forceinline__ void store(const DscoreRanges& ranges, int row, int column, float sum) const {
    const int64_t batch = ranges.batches.begin;
    const int64_t head = ranges.heads.begin;
    const int64_t query = ranges.queries.begin + row;
    const int64_t key = ranges.keys.begin + column;
    if (params.sum == DscoreSum::kDelta) {
      const attention::Sequence sequence = p.sequences.at(batch);
      if (query >= sequence.num_queries) return;
      const int64_t place = sequence.query_begin + query;
      const float dlse = p.dlse.present() ? *p.dlse.at<const float>(batch, head, place) : 0.0f;
      *p.delta.at<float>(batch, head, place) = sum - dlse;
    } else if (params.sum == DscoreSum::kAlibi) {
      static_cast<float*>(p.alibi_partials.data)[blockIdx.x] = sum;
    } else if (query < p.sequences.max_seqlen_q && key < p.sequences.max_seqlen_k) {
      const attention::BiasGradient& g = p.dbias;
      store_dbias<Element>(
          g, batch * g.batch_stride + head * g.head_stride + query * g.query_stride + key * g.key_stride, sum);
    }
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
  Kernel kernel = {params, params.p, *reinterpret_cast<typename Kernel::Shared*>(shared_memory)};
  kernel.run(ranges);
}

template <class Element>
cudaError_t dscore_sums(const BackwardParams& p, const BackwardPlan& plan, DscoreSum sum, cudaStream_t stream) {
  return with_head_dim<Element>(plan.dscore_head_dim, [&](auto head_dim) {
    if constexpr (kDqConfigs[dscore_sums_row(sizeof(Element), head_dim())].head_dim == head_dim()) {
      using Kernel = DscoreSumsKernel<Element, head_dim()>;
      const DscoreParams params = Kernel::make_params(p, sum);
      return launch<Kernel>(dscore_sums_kernel<Kernel>, params, params.num_blocks(), stream);
    } else {
      return cudaErrorInvalidValue;
    }
  });
}

}  // namespace flash_attn_ext::sm80
