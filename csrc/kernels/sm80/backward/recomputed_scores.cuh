// What kernels share that compute P and dS again: the tiles of a head, their operands in shared memory, S and dP. They
// never use single TF32 products, so that no rounded dS is summed.
//
// Shared memory: Q, dO, K and V of one tile of scores. Where it has no room for all, Q and dO share a tile, and so do K
// and V.
#pragma once

#include "attention/division.h"
#include "kernels/config/sm80.h"
#include "kernels/config/sm80_backward.h"
#include "kernels/schedule/head_tiles.h"
#include "kernels/score/mask_coverage.cuh"
#include "kernels/score/score_gradient.cuh"
#include "kernels/score/staging.cuh"
#include "kernels/sm80/launch.cuh"
#include "kernels/sm80/sm80_kernels.h"
#include "tile/sm80/copy_rows.h"
#include "tile/sm80/gemm.h"

namespace flash_attn_ext::sm80 {

template <class ElementType, int kHeadDim>
struct RecomputedScores {
  using Element = ElementType;
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

  // A tile of scores, whose operands are to be loaded.
  struct Tile {
    Where where;  // the warp's rows
    bool masked;  // the mask hides some of it
    bool full;    // every query sees every key, but for the mask
    attention::Interval queries;
    attention::Interval keys;
    bool has_queries = false;  // Q and dO are in shared memory already
    bool has_keys = false;     // K and V are
  };

  struct Computed {
    Scores weights;  // P, before dropout
    Scores dscores;  // dS, or P dP
  };

  const BackwardParams& p;
  Operands& operands;

  // Calls function(tile) for the tiles that have visible scores in ascending order, queries in the outer loop. Q and dO
  // are loaded once for each tile of queries, and K and V once for a head if there is one tile of keys.
  template <class Function>
  __device__ __forceinline__ void for_each_tile(const HeadCoord& coord, const attention::Interval& queries,
                                                const attention::Interval& keys, Function&& function) {
    const int64_t query_end = min(queries.end, coord.sequence.num_queries);
    const bool has_one_key_tile = keys.end - keys.begin <= kTile.keys;
    bool has_keys = false;
    for (int64_t query = queries.begin; query < query_end; query += kTile.queries) {
      const attention::Interval of_tile = {query, min(query + kTile.queries, query_end)};
      const TileRange tiles = tile_range<kTile.keys>(p.visibility.keys_of(of_tile.begin, coord.sequence),
                                                     p.visibility.keys_of(of_tile.end - 1, coord.sequence));
      const int64_t key_end = min(keys.end, int64_t{tiles.end} * kTile.keys);
      bool has_queries = false;
      for (int64_t key = max(keys.begin, int64_t{tiles.begin} * kTile.keys); key < key_end; key += kTile.keys) {
        const attention::Interval keys_of_tile = {key, min(key + kTile.keys, coord.sequence.num_keys)};
        const MaskCoverage attended = mask_coverage(p, coord, of_tile, keys_of_tile);
        if (attended == MaskCoverage::kNone) continue;
        function(Tile{.where = {p, coord, query + tile::warp() * kRowsPerWarp, key},
                      .masked = attended == MaskCoverage::kMixed,
                      .full = tiles.full(static_cast<int>(key / kTile.keys)),
                      .queries = of_tile,
                      .keys = keys_of_tile,
                      .has_queries = has_queries,
                      .has_keys = has_keys});
        has_queries = !kSharesTiles;
        has_keys = !kSharesTiles && has_one_key_tile;
      }
    }
  }

  // Loads the operands of a tile, and computes P and dS; or P and P dP where kSubtractsDelta is false.
  template <bool kSubtractsDelta>
  __device__ __forceinline__ Computed compute(const Tile& tile) {
    load(tile);
    Scores scores;
    Scores gradients;
    scores.clear();
    gradients.clear();
    tile::multiply_head_dims(scores, operands.q(), tile::warp() * kRowsPerWarp, operands.k());
    if constexpr (kSharesTiles) {
      __syncthreads();  // no warp reads Q and K any more
      copy_operands<false, true>(tile);
      await_operands();
    }
    // Sums of dS over keys cancel against delta, in which no tensor core has truncated sums.
    tile::multiply_rows<QueryTile, tile::Sums::kRounded>(gradients, operands.dout(), tile::warp() * kRowsPerWarp,
                                                         operands.v());
    QueryStatistics statistics[Scores::kThreadRows];
#pragma unroll
    for (int r = 0; r < Scores::kThreadRows; ++r) {
      statistics[r] = load_statistics<true>(p, tile.where.coord, tile.where.first_row + Scores::row(r));
      if (!kSubtractsDelta) statistics[r].delta = 0.0f;
    }
    const auto statistics_of = [&](int r, int) -> const auto& { return statistics[r]; };
    const BiasMask& bias_mask = operands.bias_mask[tile::warp()];
    if (tile.full) {
      differentiate<Differentiation<true, false, GradientOf::kScore>>(scores, gradients, tile.where, bias_mask,
                                                                      tile.masked, statistics_of);
    } else {
      differentiate<Differentiation<true, true, GradientOf::kScore>>(scores, gradients, tile.where, bias_mask,
                                                                     tile.masked, statistics_of);
    }
    return {scores, gradients};
  }

 private:
  __device__ __forceinline__ void load(const Tile& tile) {
    __syncthreads();  // no warp reads the preceding tile any more
    stage(operands.bias_mask[tile::warp()], tile.where, tile.masked);
    copy_operands<true, !kSharesTiles>(tile);
    await_operands();
  }

  // Issues the copies of Q and K, of dO and V, or of all.
  template <bool kQAndK, bool kDoutAndV>
  __device__ __forceinline__ void copy_operands(const Tile& tile) {
    const HeadCoord& coord = tile.where.coord;
    const int64_t batch = coord.sequence.batch;
    const int64_t query = coord.sequence.query_begin + tile.queries.begin;
    const int64_t key = coord.sequence.key_begin + tile.keys.begin;
    if (kQAndK && !tile.has_queries)
      load_rows(operands.q(), p.q, p.head_dim_qk, p.q.row<const Element>(batch, coord.head, query), tile.queries);
    if (kDoutAndV && !tile.has_queries)
      load_rows(operands.dout(), p.dout, p.head_dim_v, p.dout.row<const Element>(batch, coord.head, query),
                tile.queries);
    if (kQAndK && !tile.has_keys)
      load_rows(operands.k(), p.k, p.head_dim_qk, p.k.row<const Element>(batch, coord.key_head, key), tile.keys);
    if (kDoutAndV && !tile.has_keys)
      load_rows(operands.v(), p.v, p.head_dim_v, p.v.row<const Element>(batch, coord.key_head, key), tile.keys);
  }

  template <class Target>
  __device__ __forceinline__ static void load_rows(Target& target, const attention::MatrixView& view, int64_t head_dim,
                                                   const Element* first_row, const attention::Interval& rows) {
    tile::copy_rows_async<kThreads>(target, {first_row, view.row_stride, static_cast<int>(head_dim)},
                                    static_cast<int>(rows.end - rows.begin));
  }

  __device__ __forceinline__ static void await_operands() {
    ptx::commit_copies();
    ptx::wait_copies<0>();
    __syncthreads();
  }
};

// Calls function(head_dim) with the head dim as a constant, if it has kernels of recomputed dS.
template <class Element, class Function>
cudaError_t with_dscore_head_dim(int head_dim, Function&& function) {
  return with_head_dim<Element>(head_dim, [&](auto kernel_head_dim) {
    if constexpr (kDqConfigs[dscore_sums_row(sizeof(Element), kernel_head_dim())].head_dim == kernel_head_dim()) {
      return function(kernel_head_dim);
    } else {
      return cudaErrorInvalidValue;
    }
  });
}

}  // namespace flash_attn_ext::sm80
