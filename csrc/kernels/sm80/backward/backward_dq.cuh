// dQ, query-stationary: dQ = scale * dS K, with S and dP recomputed.
//
// Grid: one CTA per (batch, query head, query tile, slice of dQ's columns), longest tiles first. Each warp owns
// kTile.queries / kTile.warps rows: S, dP and dQ live in its registers, and dS is the left operand of the dQ GEMM from
// there. Shared memory: Q, dO, one tile of K and one of V, and in kernels that read a bias or mask each warp's bias and
// mask. The load of K overlaps dP = dO V^T. The load of the next V overlaps S = Q K^T, dS and dQ. Bias and mask are
// loaded during dQ and the next dP. Two or more CTAs per SM hide each other's latency. In the two-pass backward, this
// kernel materialises P and dS in p.materialised for the dK and dV GEMMs. Split-KV, for few queries that see many keys:
// blockIdx.y is the split of the tile's keys whose partial dQ the CTA writes (p.dq_partials). Where K and V share a
// tile, each is loaded when the other one is not read any more.
#pragma once

#include <type_traits>

#include "kernels/config/sm80.h"
#include "kernels/config/sm80_backward.h"
#include "kernels/epilogue/store_rows.cuh"
#include "kernels/schedule/block.cuh"
#include "kernels/schedule/head_tiles.h"
#include "kernels/score/mask_coverage.cuh"
#include "kernels/score/score_gradient.cuh"
#include "kernels/score/staging.cuh"
#include "kernels/sm80/backward/materialised_scores.cuh"
#include "kernels/sm80/backward/pending_delta.cuh"
#include "tile/sm80/copy_rows.h"
#include "tile/sm80/gemm.h"

namespace flash_attn_ext::sm80 {

template <class Traits>
struct BackwardDqKernel {
  using Element = typename Traits::Element;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr TileShape kTile = Traits::kConfig.tile;
  static constexpr int kThreads = kTile.warps * kWarpSize;
  static constexpr int kRowsPerWarp = kTile.queries / kTile.warps;
  static constexpr bool kMayMaterialiseScores = Traits::kConfig.materialises_scores;
  static constexpr bool kMaySplitKv = Traits::kConfig.split_kv;
  static constexpr bool kOneKeyTile = Traits::kConfig.one_key_tile;
  // The type in which positions are divided. It decides which registers ptxas has left, and so which kernels spill.
  using Position = std::conditional_t<kMaySplitKv, uint32_t, int64_t>;
  // Whether masked tiles have a loop body of their own. Kernels of larger head dims, which materialise scores, have a
  // branch there anyway.
  static constexpr bool kTwoBodies = !Traits::kGeneric && kHeadDim <= 128;

  using Scores = tile::Accumulator<kRowsPerWarp / 16, kTile.keys / 8>;
  using Where = ScoreTile<Rows::kQueries, Scores>;
  using BiasMask =
      std::conditional_t<Traits::kHasBiasMask,
                         StagedBiasMask<Element, Where, gradient_stages_bias(sizeof(Element), kHeadDim)>, NoBiasMask>;

  using KeyTile = tile::SharedTile<Element, kTile.keys, kHeadDim>;

  struct Shared {
    tile::SharedTile<Element, kTile.queries, kHeadDim> q;
    tile::SharedTile<Element, kTile.queries, kHeadDim> dout;
    KeyTile key_tiles[kOneKeyTile ? 1 : 2];
    BiasMask bias_mask[Traits::kHasBiasMask ? kTile.warps : 1];

    __device__ __forceinline__ KeyTile& k() { return key_tiles[0]; }
    __device__ __forceinline__ KeyTile& v() { return key_tiles[kOneKeyTile ? 0 : 1]; }
  };

  using Gradient = tile::Accumulator<kRowsPerWarp / 16, kTile.columns / 8>;
  using ScoreRows = MaterialisedRows<Element, Scores>;

  const BackwardParams& p;
  const Schedule& schedule;
  Shared& shared;
  HeadCoord coord;
  int first_query;
  int first_column;  // of the CTA's slice of dQ
  int num_keys;
  Gradient dq;
  QueryStatistics statistics[Scores::kThreadRows];
  ScoreRows score_rows;

  __device__ __forceinline__ void run() {
    const attention::Interval first = p.visibility.keys_of<int>(first_query, coord.sequence);
    const attention::Interval last = p.visibility.keys_of<int>(first_query + num_queries() - 1, coord.sequence);
    num_keys = static_cast<int>(coord.sequence.num_keys);
    dq.clear();
    const bool sees_keys = first.begin < last.end;
    if (sees_keys) load_queries();
    const int64_t warp_query = first_query + tile::warp() * kRowsPerWarp;
    float delta[Scores::kThreadRows];
    if (p.delta_is_pending) compute_delta<Element, Scores>(delta, p, coord, warp_query);
#pragma unroll
    for (int r = 0; r < Scores::kThreadRows; ++r) {
      statistics[r] = load_statistics<Traits::kHasBiasMask>(p, coord, warp_query + Scores::row(r));
      if (p.delta_is_pending) statistics[r].delta = delta[r];
    }
    if (sees_keys) stream(first, last);
    if (p.dq.data == nullptr) return;
    if (is_partial()) {
      store_partial();
      return;
    }
    store();
    flag_nan<kTile.warps>(p.dq_nan_flags, dq);
  }

 private:
  // Whether CTAs share the tile's keys (split-KV).
  __device__ __forceinline__ bool is_partial() const { return kMaySplitKv && p.dq_partials.present(); }

  __device__ __forceinline__ int num_queries() const {
    return static_cast<int>(min(coord.sequence.num_queries - first_query, int64_t{kTile.queries}));
  }

  // Issues the copies of Q and dO; they are committed with those of the first key tile.
  __device__ __forceinline__ void load_queries() {
    const int64_t row = coord.sequence.query_begin + first_query;
    const auto* q = p.q.row<const Element>(coord.sequence.batch, coord.head, row);
    const auto* dout = p.dout.row<const Element>(coord.sequence.batch, coord.head, row);
    tile::copy_rows_async<kThreads>(shared.q, {q, p.q.row_stride, static_cast<int>(p.head_dim_qk)}, num_queries());
    tile::copy_rows_async<kThreads>(shared.dout, {dout, p.dout.row_stride, static_cast<int>(p.head_dim_v)},
                                    num_queries());
  }

  template <class Tile>
  __device__ __forceinline__ void load_keys(Tile& target, const tile::GlobalRows<Element>& rows, int tile) {
    const int first_key = tile * kTile.keys;
    tile::copy_rows_async<kThreads>(target, {rows.data + first_key * rows.stride, rows.stride, rows.columns},
                                    num_keys - first_key);
    ptx::commit_copies();
  }

  // The keys and values of the head, up to the CTA's last tile.
  struct Keys {
    tile::GlobalRows<Element> k;
    tile::GlobalRows<Element> v;
    int end_tile;
  };

  __device__ __forceinline__ Where where_of(int tile) const {
    return {p, coord, first_query + tile::warp() * kRowsPerWarp, int64_t{tile} * kTile.keys};
  }

  // The mainloop over the key tiles that the CTA's queries see, or over its split of them, in ascending order.
  __device__ __forceinline__ void stream(const attention::Interval& first, const attention::Interval& last) {
    TileRange tiles = tile_range<kTile.keys, Position>(first, last);
    if (is_partial()) tiles = tiles.split(blockIdx.y, p.dq_partials.count);
    const int64_t key_row = coord.sequence.key_begin;
    const Keys keys = {.k = {p.k.row<const Element>(coord.sequence.batch, coord.key_head, key_row), p.k.row_stride,
                             static_cast<int>(p.head_dim_qk)},
                       .v = {p.v.row<const Element>(coord.sequence.batch, coord.key_head, key_row), p.v.row_stride,
                             static_cast<int>(p.head_dim_v)},
                       .end_tile = tiles.end};
    const auto coverage = [&](int tile) {
      return mask_coverage(p, coord, {first_query, first_query + kTile.queries},
                           {int64_t{tile} * kTile.keys, int64_t{tile + 1} * kTile.keys});
    };
    MainloopTile at = next_unmasked<1, Traits::kHasBiasMask>(tiles.begin, keys.end_tile, coverage);
    if (materialises_scores()) score_rows = ScoreRows(p, coord, first_query + tile::warp() * kRowsPerWarp);
    if (Traits::kHasBiasMask && materialises_scores()) score_rows.write_zeros(p, tiles.begin, at.tile);
    load_v(keys, at);
    load_bias_mask(keys, at);
    while (at.tile != keys.end_tile) {
      const MainloopTile next = next_unmasked<1, Traits::kHasBiasMask>(at.tile + 1, keys.end_tile, coverage);
      const bool partial = !tiles.full(at.tile);
      if constexpr (!kTwoBodies) {
        attend(keys, at, next, partial);
      } else if (partial) {
        attend(keys, at, next, std::true_type{});
      } else {
        attend(keys, at, next, std::false_type{});
      }
      if (Traits::kHasBiasMask && materialises_scores()) score_rows.write_zeros(p, at.tile + 1, next.tile);
      at = next;
    }
    ptx::commit_copies();  // Q and dO, where the mask left no key tile
    ptx::wait_copies<0>();
    __syncthreads();  // the tile of Q is reused as staging
  }

  __device__ __forceinline__ void load_v(const Keys& keys, const MainloopTile& at) {
    if (at.tile != keys.end_tile) load_keys(shared.v(), keys.v, at.tile);
  }

  // Committed last, so that wait_copies can wait for V only.
  __device__ __forceinline__ void load_bias_mask(const Keys& keys, const MainloopTile& at) {
    if constexpr (Traits::kHasBiasMask) {
      if (at.tile != keys.end_tile) stage(own_bias_mask(), where_of(at.tile), at.masked);
      ptx::commit_copies();
    }
  }
  __device__ __forceinline__ BiasMask& own_bias_mask() const {
    return shared.bias_mask[Traits::kHasBiasMask ? tile::warp() : 0];
  }

  __device__ __forceinline__ bool materialises_scores() const {
    return kMayMaterialiseScores && p.materialised.p != nullptr;
  }

  // One iteration. Where the compiler knows whether the tile is masked, there is no branch between the GEMMs, and it
  // interleaves them with the instructions in between.
  template <class Partial>
  __device__ __forceinline__ void attend(const Keys& keys, const MainloopTile& at, const MainloopTile& next,
                                         Partial partial) {
    const auto where = where_of(at.tile);
    ptx::wait_copies<Traits::kHasBiasMask && !kOneKeyTile ? 1 : 0>();
    __syncthreads();  // V, and at first Q and dO, have arrived, and no warp reads K any more
    if constexpr (!kOneKeyTile) load_keys(shared.k(), keys.k, at.tile);
    Scores scores;
    Scores gradients;
    scores.clear();
    gradients.clear();
    tile::multiply_head_dims(gradients, shared.dout, tile::warp() * kRowsPerWarp, shared.v());
    if constexpr (kOneKeyTile) {
      __syncthreads();  // no warp reads V any more
      load_keys(shared.k(), keys.k, at.tile);
    }
    ptx::wait_copies<0>();
    __syncthreads();  // K, bias and mask have arrived, and no warp reads V any more
    if constexpr (!kOneKeyTile) load_v(keys, next);
    tile::multiply_head_dims(scores, shared.q, tile::warp() * kRowsPerWarp, shared.k());
    const auto statistics_of = [&](int r, int) -> const auto& { return statistics[r]; };
    const auto differentiate_tile = [&](auto is_partial) {
      if constexpr (Traits::kHasBiasMask) {
        differentiate<Differentiation<Traits::kGeneric, is_partial(), GradientOf::kProduct>>(
            scores, gradients, where, own_bias_mask(), at.masked, statistics_of);
      } else {
        differentiate_scaled<is_partial()>(scores, gradients, where, statistics_of);
      }
    };
    if (partial) {
      differentiate_tile(std::true_type{});
    } else {
      differentiate_tile(std::false_type{});
    }
    if constexpr (Traits::kHasBiasMask) {
      __syncwarp();  // no lane reads the bias and mask any more
      load_bias_mask(keys, next);
    }
    if (materialises_scores()) {
      score_rows.write(p, p.materialised.p, at.tile * kTile.keys, scores);
      score_rows.write(p, p.materialised.ds, at.tile * kTile.keys, gradients);
    }
    tile::multiply_registers(dq, gradients, shared.k(), first_column);
    if constexpr (kOneKeyTile) {
      __syncthreads();  // no warp reads K any more
      load_v(keys, next);
    }
  }

  __device__ __forceinline__ void store() {
    const float scale = static_cast<float>(p.score_mod.scale);
    const int first_row = tile::warp() * kRowsPerWarp;  // the warp's first row of the tile
    const int64_t query = first_query + first_row;
    Element* target = p.dq.row<Element>(coord.sequence.batch, coord.head, coord.sequence.query_begin + query);
    dq.scale(scale);
    store_rows<Element>({.data = target + first_column * p.dq.column_stride,
                         .row_stride = p.dq.row_stride,
                         .column_stride = p.dq.column_stride,
                         .rows = static_cast<int>(min(coord.sequence.num_queries - query, int64_t{kRowsPerWarp})),
                         .columns = static_cast<int>(p.head_dim_qk) - first_column},
                        dq, shared.q, first_row);
  }

  __device__ __forceinline__ void store_partial() const {
    const int first = first_query + tile::warp() * kRowsPerWarp + Gradient::row(0);
    const auto columns = static_cast<int>(p.dq_partials.sums.row_stride);
    const int rows = static_cast<int>(coord.sequence.num_queries) - first;
    float* target = p.dq_partials.row(blockIdx.y, coord.sequence.batch, coord.head, coord.sequence.query_begin + first);
#pragma unroll
    for (int r = 0; r < Gradient::kThreadRows; ++r) {
      if (Gradient::row_step(r) >= rows) continue;
      store_row<float>({target + Gradient::row_step(r) * columns, columns, 1}, dq, r, 1.0f);
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kTile.ctas_per_sm)
    backward_dq_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ Schedule schedule) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const QueryBlock block = query_block<Kernel>(p, schedule);
  if (block.first_query >= block.coord.sequence.num_queries) return;
  Kernel kernel = {p,
                   schedule,
                   *reinterpret_cast<typename Kernel::Shared*>(shared_memory),
                   block.coord,
                   static_cast<int>(block.first_query),
                   block.first_column};
  kernel.run();
}

}  // namespace flash_attn_ext::sm80
