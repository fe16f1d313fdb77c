// dK and dV, key-stationary (Dao 2023, "FlashAttention-2", algorithm 2 without its dQ).
//
// Grid: one CTA per (batch, key head, tile of kKeys keys). Each warp owns kTile.keys / kTile.warps keys. The
// accumulators of its rows of S^T = K Q^T and dP^T = V dO^T have the register layout of a left operand, so that dV +=
// P^T dO and dK += dS^T Q read P and dS from registers, without shared memory and without a barrier between warps. The
// mainloop iterates over the query heads of the KV group and their query tiles in one fixed order, and no other CTA
// writes the same rows. Shared memory: K, V, one or two stages of Q and dO, and in generic kernels each warp's bias and
// mask. Where Q and dO share a tile, the operand of the last GEMM is loaded second. With two stages, the load of the
// next query tile overlaps the current iteration. In the two-pass backward, this kernel materialises dS in
// p.materialised for the dQ GEMM.
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
#include "tile/sm80/copy_rows.h"
#include "tile/sm80/gemm.h"

namespace flash_attn_ext::sm80 {

template <class Traits>
struct BackwardDkdvKernel {
  using Element = typename Traits::Element;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr KeyStationaryTile kTile = Traits::kConfig.tile;
  static constexpr int kThreads = kTile.warps * kWarpSize;
  static constexpr int kRowsPerWarp = kTile.keys / kTile.warps;
  // Whether one launch computes both gradients. Otherwise each launch computes the one that has data, since both do not
  // fit registers.
  static constexpr bool kBoth = kTile.both;
  static constexpr bool kOneQueryTile = Traits::kConfig.one_query_tile;
  static_assert(!kOneQueryTile || (Traits::kGeneric && !kBoth && kTile.stages == 1));
  static constexpr bool kMayMaterialiseScores = kBoth && Traits::kConfig.materialises_scores;

  using Scores = tile::Accumulator<kRowsPerWarp / 16, kTile.queries / 8>;
  using Where = ScoreTile<Rows::kKeys, Scores>;
  using BiasMask =
      std::conditional_t<Traits::kGeneric,
                         StagedBiasMask<Element, Where, gradient_stages_bias(sizeof(Element), kHeadDim)>, NoBiasMask>;
  using QueryTile = tile::SharedTile<Element, kTile.queries, kHeadDim>;
  static constexpr int kStatistics = Traits::kGeneric ? 3 : 2;  // a query's LSE, delta, and the residual of the LSE

  struct Stage {
    QueryTile tiles[kOneQueryTile ? 1 : 2];
    float statistics[kStatistics][kTile.queries];

    __device__ __forceinline__ QueryTile& q() { return tiles[0]; }
    __device__ __forceinline__ QueryTile& dout() { return tiles[kOneQueryTile ? 0 : 1]; }
  };
  struct Shared {
    tile::SharedTile<Element, kTile.keys, kHeadDim> k;
    tile::SharedTile<Element, kTile.keys, kHeadDim> v;
    Stage stages[kTile.stages];
    BiasMask bias_mask[Traits::kGeneric ? kTile.warps : 1];
  };

  using Gradient = tile::Accumulator<kRowsPerWarp / 16, kTile.columns / 8>;

  const BackwardParams& p;
  const Schedule& schedule;
  Shared& shared;
  HeadCoord coord;
  int first_key;
  int first_column;  // of the CTA's slice of dK and dV
  Gradient dk;       // or the launch's only gradient
  Gradient dv;

  __device__ __forceinline__ void run() {
    const int num_keys = static_cast<int>(min(coord.sequence.num_keys - first_key, int64_t{kTile.keys}));
    const attention::Interval first = p.visibility.queries_of(first_key, coord.sequence);
    const attention::Interval last = p.visibility.queries_of(first_key + num_keys - 1, coord.sequence);
    const int64_t row = coord.sequence.key_begin + first_key;
    const auto* k = p.k.row<const Element>(coord.sequence.batch, coord.key_head, row);
    const auto* v = p.v.row<const Element>(coord.sequence.batch, coord.key_head, row);
    tile::copy_rows_async<kThreads>(shared.k, {k, p.k.row_stride, static_cast<int>(p.head_dim_qk)}, num_keys);
    tile::copy_rows_async<kThreads>(shared.v, {v, p.v.row_stride, static_cast<int>(p.head_dim_v)}, num_keys);
    ptx::commit_copies();  // also waited for where no query tile is loaded
    dk.clear();
    dv.clear();
    const uint32_t group = first.begin < last.end ? schedule.group : 0;
    for (uint32_t g = 0; g < group; ++g) {
      stream(first, last);
      ++coord.head;
    }
    ptx::wait_copies<0>();
    __syncthreads();  // the tiles of K and V are reused as staging
    const float scale = static_cast<float>(p.score_mod.scale);
    if (wants_dk()) dk.scale(scale);
    if (p.dk.data != nullptr) store(p.dk, dk, p.head_dim_qk, shared.k);
    if (p.dv.data != nullptr) store(p.dv, kBoth ? dv : dk, p.head_dim_v, shared.v);
    flag_nan<kTile.warps>(p.dkdv_nan_flags, dk, dv);
  }

 private:
  __device__ __forceinline__ bool wants_dk() const { return kBoth || p.dk.data != nullptr; }

  // The query tiles of a head: Q, dO and the statistics. cp.async loads the statistics, too: a thread that waited for
  // them would delay all others at the next barrier.
  struct Queries {
    const BackwardDkdvKernel& kernel;
    int count;
    tile::TileSource<kThreads, QueryTile> q;
    tile::TileSource<kThreads, QueryTile> dout;
    int whole;               // tiles that have all their queries
    const float* statistic;  // scale-only kernels: the thread's statistic of tile 0

    __device__ __forceinline__ explicit Queries(const BackwardDkdvKernel& kernel)
        : kernel(kernel),
          count(static_cast<int>(kernel.coord.sequence.num_queries)),
          q(rows_of(kernel.p.q, kernel.p.head_dim_qk), count),
          dout(rows_of(kernel.p.dout, kernel.p.head_dim_v), count),
          whole(ptx::pin(q.regular() && dout.regular() ? count / kTile.queries : 0)),
          statistic(statistics_of(threadIdx.x < kTile.queries ? kernel.p.lse : kernel.p.delta) + own_query()) {}

    __device__ __forceinline__ static int own_query() { return threadIdx.x % kTile.queries; }

    __device__ __forceinline__ tile::GlobalRows<Element> rows_of(const attention::MatrixView& view,
                                                                 int64_t columns) const {
      const HeadCoord& coord = kernel.coord;
      return {view.row<const Element>(coord.sequence.batch, coord.head, coord.sequence.query_begin), view.row_stride,
              static_cast<int>(columns)};
    }
    __device__ __forceinline__ const float* statistics_of(const attention::StatisticView& view) const {
      const HeadCoord& coord = kernel.coord;
      return view.at<const float>(coord.sequence.batch, coord.head, coord.sequence.query_begin);
    }

    __device__ __forceinline__ void load(Stage& stage, int tile) const {
      if constexpr (Traits::kGeneric) {  // they have no registers to cache addresses
        if (!kOneQueryTile || !kernel.wants_dk()) q.template copy<false>(stage.q(), tile, whole);
        if (!kOneQueryTile || kernel.wants_dk()) dout.template copy<false>(stage.dout(), tile, whole);
        copy_statistics(stage, tile * kTile.queries);
      } else {
        if (tile < whole) {
          q.copy_whole(stage.q(), tile);
          dout.copy_whole(stage.dout(), tile);
        } else {
          q.copy_some(stage.q(), tile);
          dout.copy_some(stage.dout(), tile);
        }
        static_assert(2 * kTile.queries <= kThreads);
        if (threadIdx.x < 2 * kTile.queries) {
          ptx::copy_async_4(ptx::shared_address(&stage.statistics[0][0] + threadIdx.x),
                            statistic + tile * kTile.queries, tile * kTile.queries + own_query() < count);
        }
      }
      ptx::commit_copies();
    }

    // Loads the operand of the last GEMM where Q and dO share a tile.
    __device__ __forceinline__ void load_second(Stage& stage, int tile) const {
      if (kernel.wants_dk()) {
        q.template copy<false>(stage.q(), tile, whole);
      } else {
        dout.template copy<false>(stage.dout(), tile, whole);
      }
      ptx::commit_copies();
    }

    __device__ __forceinline__ void copy_statistics(Stage& stage, int first_query) const {
      const BackwardParams& p = kernel.p;
      const int query = own_query();
      const bool exists = first_query + query < count;
#pragma unroll
      for (int first = 0; first < kStatistics; first += kThreads / kTile.queries) {
        const int which = first + threadIdx.x / kTile.queries;
        if (which >= kStatistics) break;
        const attention::StatisticView& view = which == 0 ? p.lse : which == 1 ? p.delta : p.lse_residual;
        ptx::copy_async_4(ptx::shared_address(&stage.statistics[which][query]),
                          statistics_of(view) + first_query + query, exists && view.present());
      }
    }
  };

  __device__ __forceinline__ Where where_of(int tile) const {
    return {p, coord, first_key + tile::warp() * kRowsPerWarp, int64_t{tile} * kTile.queries};
  }
  __device__ __forceinline__ BiasMask& own_bias_mask() const {
    return shared.bias_mask[Traits::kGeneric ? tile::warp() : 0];
  }

  // Called when no lane of the warp reads those of the preceding tile any more.
  __device__ __forceinline__ void load_bias_mask(const MainloopTile& at) const {
    if constexpr (Traits::kGeneric) {
      stage(own_bias_mask(), where_of(at.tile), at.masked);
      ptx::commit_copies();
    }
  }

  // The mainloop over the query tiles of a head that see one of the CTA's keys, in ascending order. Keys past the end
  // of the sequence are zero-padded and not stored, so no tile has to mask them.
  __device__ __forceinline__ void stream(const attention::Interval& first, const attention::Interval& last) {
    const TileRange tiles = tile_range<kTile.queries, uint32_t>(first, last);
    const int end_tile = ptx::pin(tiles.end);
    const int full_begin = tiles.full_begin;
    const int full_end = tiles.full_end;

    const auto coverage = [&](int tile) {
      return mask_coverage(p, coord, {int64_t{tile} * kTile.queries, int64_t{tile + 1} * kTile.queries},
                           {first_key, first_key + kTile.keys});
    };
    const bool materialises_scores = kMayMaterialiseScores && p.materialised.present();
    MainloopTile at = next_unmasked<1, Traits::kGeneric>(tiles.begin, end_tile, coverage);
    using ScoreRows = MaterialisedRows<Element, Scores>;
    const ScoreRows score_rows =
        materialises_scores ? ScoreRows(p, coord, first_key + tile::warp() * kRowsPerWarp) : ScoreRows();
    if (Traits::kGeneric && materialises_scores) score_rows.write_zeros(p, tiles.begin, at.tile);
    if (at.tile == end_tile) return;
    const Queries queries(*this);
    int current = 0;
    __syncthreads();  // no warp reads the stages of the preceding head any more
    queries.load(shared.stages[current], at.tile);
    load_bias_mask(at);
    while (at.tile != end_tile) {
      const auto where = where_of(at.tile);
      const MainloopTile next = next_unmasked<1, Traits::kGeneric>(at.tile + 1, end_tile, coverage);
      Stage& stage = shared.stages[current];
      ptx::wait_copies<0>();
      __syncthreads();  // this stage has arrived, and no warp reads the other one any more
      current = (current + 1) % kTile.stages;
      if (kTile.stages == 2 && next.tile != end_tile) queries.load(shared.stages[current], next.tile);
      Scores scores;
      Scores gradients;
      scores.clear();
      gradients.clear();
      if constexpr (kOneQueryTile) {
        multiply_in_one_tile(scores, gradients, queries, stage, at.tile);
      } else {
        tile::multiply_head_dims(scores, shared.k, tile::warp() * kRowsPerWarp, stage.q());
        if (wants_dk()) tile::multiply_head_dims(gradients, shared.v, tile::warp() * kRowsPerWarp, stage.dout());
      }
      const auto statistics = [&](int, int column) {
        const float residual = Traits::kGeneric ? stage.statistics[kStatistics - 1][column] : 0.0f;
        return query_statistics<Traits::kGeneric>(stage.statistics[0][column], stage.statistics[1][column], residual);
      };
      const auto differentiate_tile = [&](auto is_partial) {
        if constexpr (Traits::kGeneric) {
          differentiate<Differentiation<true, is_partial(), GradientOf::kProduct>>(
              scores, gradients, where, own_bias_mask(), at.masked, statistics);
        } else {
          differentiate_scaled<is_partial()>(scores, gradients, where, statistics);
        }
      };
      if (at.tile >= full_begin && at.tile < full_end) {
        differentiate_tile(std::false_type{});
      } else {
        differentiate_tile(std::true_type{});
      }
      if constexpr (Traits::kGeneric) {
        __syncwarp();  // no lane reads the bias and mask any more
        if (next.tile != end_tile) load_bias_mask(next);
      }
      if (materialises_scores) {
        score_rows.write(p, p.materialised.ds, at.tile * kTile.queries, gradients);
        if (Traits::kGeneric) score_rows.write_zeros(p, at.tile + 1, next.tile);
      }
      if constexpr (kBoth) {
        tile::multiply_registers(dv, scores, stage.dout(), first_column);
        tile::multiply_registers(dk, gradients, stage.q(), first_column);
      } else {
        if (wants_dk()) scores = gradients;
        tile::multiply_registers(dk, scores, wants_dk() ? stage.q() : stage.dout(), first_column);
      }
      at = next;
      if (kTile.stages == 1 && at.tile != end_tile) {
        __syncthreads();  // no warp reads the stage any more
        queries.load(stage, at.tile);
      }
    }
  }

  // S, and dP for dK, where Q and dO share a tile. The operand that is there afterwards is that of the last GEMM.
  __device__ __forceinline__ void multiply_in_one_tile(Scores& scores, Scores& gradients, const Queries& queries,
                                                       Stage& stage, int tile) {
    const int first_row = tile::warp() * kRowsPerWarp;
    if (wants_dk()) {
      tile::multiply_head_dims(gradients, shared.v, first_row, stage.dout());
    } else {
      tile::multiply_head_dims(scores, shared.k, first_row, stage.q());
    }
    __syncthreads();  // no warp reads the first operand any more
    queries.load_second(stage, tile);
    ptx::wait_copies<0>();
    __syncthreads();  // the second one has arrived
    if (wants_dk()) tile::multiply_head_dims(scores, shared.k, first_row, stage.q());
  }

  // staging: a tile of which each warp has read its own rows only.
  template <class Tile>
  __device__ __forceinline__ void store(const attention::MatrixView& view, const Gradient& gradient, int64_t head_dim,
                                        Tile& staging) {
    const int first_row = tile::warp() * kRowsPerWarp;  // the warp's first row of the tile
    const int64_t key = first_key + first_row;
    Element* target = view.row<Element>(coord.sequence.batch, coord.key_head, coord.sequence.key_begin + key);
    store_rows<Element>({.data = target + first_column * view.column_stride,
                         .row_stride = view.row_stride,
                         .column_stride = view.column_stride,
                         .rows = static_cast<int>(min(coord.sequence.num_keys - key, int64_t{kRowsPerWarp})),
                         .columns = static_cast<int>(head_dim) - first_column},
                        gradient, staging, first_row);
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kTile.ctas_per_sm)
    backward_dkdv_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ Schedule schedule) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const KeyBlock block = key_block<Kernel>(p, schedule);
  if (block.first_key < 0) return;
  Kernel kernel = {p,           schedule,        *reinterpret_cast<typename Kernel::Shared*>(shared_memory),
                   block.coord, block.first_key, block.first_column};
  kernel.run();
}

}  // namespace flash_attn_ext::sm80
