// dQ, Q-stationary: dQ = scale * dS K, with S and dP recomputed.
//
// Grid: one block a (batch, query head, tile of kQueries queries), tiles with the most keys first. Each warp owns
// kQueries / kWarps rows: S, dP and dQ live in its registers, and dS is used as an operand from there.
// Shared memory: Q, dO, one tile of K and one of V. V travels while S = Q K^T is computed, the next K while the block
// waits for nothing else; two or more blocks on a multiprocessor fill each other's waits.
#pragma once

#include "kernels/sm80/score_gradient.cuh"
#include "kernels/sm80/store_row.cuh"
#include "kernels/tile_config.h"
#include "tile/gemm.h"

namespace flash_attn_ext::sm80 {

template <class Traits>
struct BackwardDqKernel {
  using Element = typename Traits::Element;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr QueryStationaryTile kTile = backward_dq_tile(kHeadDim);
  static constexpr int kThreads = kTile.warps * kWarpSize;
  static constexpr int kRowsPerWarp = kTile.queries / kTile.warps;

  struct Shared {
    tile::SharedTile<Element, kTile.queries, kHeadDim> q;
    tile::SharedTile<Element, kTile.queries, kHeadDim> dout;
    tile::SharedTile<Element, kTile.keys, kHeadDim> k[2];
    tile::SharedTile<Element, kTile.keys, kHeadDim> v;
  };

  using Scores = tile::Accumulator<kRowsPerWarp / 16, kTile.keys / 8>;
  using Gradient = tile::Accumulator<kRowsPerWarp / 16, kHeadDim / 8>;

  const attention::BackwardParams& p;
  Shared& shared;
  WorkItem item;
  int64_t first_query;
  int num_keys;
  Gradient dq;
  QueryStatistics statistics[Scores::kThreadRows];

  __device__ __forceinline__ void run() {
    const int num_queries = static_cast<int>(min(item.sequence.num_queries - first_query, int64_t{kTile.queries}));
    const attention::Interval first = p.visibility.keys_of(first_query, item.sequence);
    const attention::Interval last = p.visibility.keys_of(first_query + num_queries - 1, item.sequence);
    num_keys = static_cast<int>(item.sequence.num_keys);
    dq.clear();
    if (first.begin < last.end) {
      const int64_t row = item.sequence.query_begin + first_query;
      const auto* q = p.q.row<const Element>(item.sequence.batch, item.head, row);
      const auto* dout = p.dout.row<const Element>(item.sequence.batch, item.head, row);
      tile::copy_rows_async<kThreads>(shared.q, {q, p.q.row_stride, static_cast<int>(p.head_dim_qk)}, num_queries);
      tile::copy_rows_async<kThreads>(shared.dout, {dout, p.dout.row_stride, static_cast<int>(p.head_dim_v)},
                                      num_queries);
#pragma unroll
      for (int r = 0; r < Scores::kThreadRows; ++r) {
        statistics[r] = load_statistics(p, item, first_query + tile::warp() * kRowsPerWarp + Scores::row(r));
      }
      stream(first, last);
    }
    store();
  }

 private:
  template <class Tile>
  __device__ __forceinline__ void load_keys(Tile& target, const tile::GlobalRows<Element>& rows, int tile) {
    const int first_key = tile * kTile.keys;
    tile::copy_rows_async<kThreads>(target, {rows.data + first_key * rows.stride, rows.stride, rows.columns},
                                    num_keys - first_key);
    ptx::commit_copies();
  }

  // Visits the key tiles that the block's first and last query see between them, in ascending order.
  __device__ __forceinline__ void stream(const attention::Interval& first, const attention::Interval& last) {
    const int64_t key_row = item.sequence.key_begin;
    const tile::GlobalRows<Element> k = {p.k.row<const Element>(item.sequence.batch, item.key_head, key_row),
                                         p.k.row_stride, static_cast<int>(p.head_dim_qk)};
    const tile::GlobalRows<Element> v = {p.v.row<const Element>(item.sequence.batch, item.key_head, key_row),
                                         p.v.row_stride, static_cast<int>(p.head_dim_v)};
    const int first_tile = static_cast<int>(first.begin / kTile.keys);
    const int end_tile = static_cast<int>((last.end + kTile.keys - 1) / kTile.keys);
    // Every query sees every key of tiles [full_begin, full_end): the last query begins last, the first ends first.
    const int full_begin = static_cast<int>((last.begin + kTile.keys - 1) / kTile.keys);
    const int full_end = static_cast<int>(first.end / kTile.keys);
    load_keys(shared.k[first_tile % 2], k, first_tile);
    for (int tile = first_tile; tile < end_tile; ++tile) {
      ptx::wait_copies<0>();
      __syncthreads();  // K (and Q and dO) have arrived; V's and the other K's readers are done
      load_keys(shared.v, v, tile);
      if (tile + 1 < end_tile) load_keys(shared.k[(tile + 1) % 2], k, tile + 1);
      Scores scores;
      Scores gradients;
      scores.clear();
      gradients.clear();
      tile::multiply_rows(scores, shared.q, tile::warp() * kRowsPerWarp, shared.k[tile % 2]);
      tile + 1 < end_tile ? ptx::wait_copies<1>() : ptx::wait_copies<0>();
      __syncthreads();  // V has arrived
      tile::multiply_rows(gradients, shared.dout, tile::warp() * kRowsPerWarp, shared.v);
      const ScoreTile<Rows::kQueries, Scores> where = {p, item, first_query + tile::warp() * kRowsPerWarp,
                                                       int64_t{tile} * kTile.keys};
      const auto statistics_of = [&](int r, int) -> const QueryStatistics& { return statistics[r]; };
      if (tile >= full_begin && tile < full_end) {
        differentiate<Differentiation<Traits::kScore, false, GradientOf::kProduct>>(scores, gradients, where,
                                                                                    statistics_of);
      } else {
        differentiate<Differentiation<Traits::kScore, true, GradientOf::kProduct>>(scores, gradients, where,
                                                                                   statistics_of);
      }
      tile::multiply_registers(dq, gradients, shared.k[tile % 2]);
    }
  }

  __device__ __forceinline__ void store() {
    const float scale = static_cast<float>(p.score_mod.scale);
#pragma unroll
    for (int r = 0; r < Gradient::kThreadRows; ++r) {
      const int64_t query = first_query + tile::warp() * kRowsPerWarp + Gradient::row(r);
      if (query >= item.sequence.num_queries) continue;
      Element* target = p.dq.row<Element>(item.sequence.batch, item.head, item.sequence.query_begin + query);
      store_row<Element>({target, static_cast<int>(p.head_dim_qk), p.dq.column_stride}, dq, r, scale);
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads)
    backward_dq_kernel(const __grid_constant__ attention::BackwardParams p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const int64_t tiles = (p.sequences.max_seqlen_q + Kernel::kTile.queries - 1) / Kernel::kTile.queries;
  const int64_t head_index = blockIdx.x / tiles;
  const int64_t tile = tiles - 1 - blockIdx.x % tiles;
  const int64_t head = head_index % p.num_heads_q;
  const WorkItem item = {p.sequences.at(head_index / p.num_heads_q), head, head / p.queries_per_key_head()};
  const int64_t first_query = tile * Kernel::kTile.queries;
  if (first_query >= item.sequence.num_queries) return;
  Kernel kernel = {p, *reinterpret_cast<typename Kernel::Shared*>(shared_memory), item, first_query};
  kernel.run();
}

}  // namespace flash_attn_ext::sm80
