// dK and dV, KV-stationary (Dao 2023, "FlashAttention-2", algorithm 2 without its dQ).
//
// Grid: one block a (batch, key head, tile of kKeys keys). Each warp owns 16 keys: its rows of S^T = K Q^T and
// dP^T = V dO^T come out as accumulators whose register layout is that of a left operand, so that dV += P^T dO and
// dK += dS^T Q read P and dS from registers, without shared memory and without a barrier between warps.
// Query heads of the group and query tiles are visited in one fixed order, and the block alone writes its rows.
// Shared memory: K, V, and two stages of Q and dO, so that the next query tile travels while this one is used.
#pragma once

#include "kernels/sm80/score_gradient.cuh"
#include "kernels/sm80/store_row.cuh"
#include "kernels/tile_config.h"
#include "tile/gemm.h"

namespace flash_attn_ext::sm80 {

// Which gradients one launch accumulates. For large head dims both do not fit into registers.
enum class KeyGradient { kBoth, kDk, kDv };

template <class Traits, KeyGradient kGradient>
struct BackwardDkdvKernel {
  using Element = typename Traits::Element;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr KeyStationaryTile kTile = backward_dkdv_tile(kHeadDim, Traits::kExtended);
  static constexpr int kThreads = kTile.warps * kWarpSize;
  static constexpr int kRowsPerWarp = 16;
  static_assert(kTile.keys == kTile.warps * kRowsPerWarp);
  static constexpr bool kWantDk = kGradient != KeyGradient::kDv;
  static constexpr bool kWantDv = kGradient != KeyGradient::kDk;

  struct Stage {
    tile::SharedTile<Element, kTile.queries, kHeadDim> q;
    tile::SharedTile<Element, kTile.queries, kHeadDim> dout;
    QueryStatistics statistics[kTile.queries];
  };
  struct Shared {
    tile::SharedTile<Element, kTile.keys, kHeadDim> k;
    tile::SharedTile<Element, kTile.keys, kHeadDim> v;
    Stage stages[2];
  };

  using Scores = tile::Accumulator<1, kTile.queries / 8>;
  using Gradient = tile::Accumulator<1, kHeadDim / 8>;

  const attention::BackwardParams& p;
  Shared& shared;
  WorkItem item;
  int64_t first_key;
  Gradient dk;
  Gradient dv;

  __device__ __forceinline__ void run() {
    const int num_keys = static_cast<int>(min(item.sequence.num_keys - first_key, int64_t{kTile.keys}));
    const attention::Interval first = p.visibility.queries_of(first_key, item.sequence);
    const attention::Interval last = p.visibility.queries_of(first_key + num_keys - 1, item.sequence);
    if constexpr (kWantDk) dk.clear();
    if constexpr (kWantDv) dv.clear();
    const int64_t row = item.sequence.key_begin + first_key;
    const auto* k = p.k.row<const Element>(item.sequence.batch, item.key_head, row);
    const auto* v = p.v.row<const Element>(item.sequence.batch, item.key_head, row);
    tile::copy_rows_async<kThreads>(shared.k, {k, p.k.row_stride, static_cast<int>(p.head_dim_qk)}, num_keys);
    tile::copy_rows_async<kThreads>(shared.v, {v, p.v.row_stride, static_cast<int>(p.head_dim_v)}, num_keys);
    const int64_t group = p.queries_per_key_head();
    for (int64_t g = 0; g < group; ++g) {
      item.head = item.key_head * group + g;
      if (first.begin < last.end) stream(first, last);
    }
    ptx::wait_copies<0>();
    const float scale = static_cast<float>(p.score_mod.scale);
    if (kWantDk && p.dk.data != nullptr) store(p.dk, dk, static_cast<int>(p.head_dim_qk), scale);
    if (kWantDv && p.dv.data != nullptr) store(p.dv, dv, static_cast<int>(p.head_dim_v), 1.0f);
  }

 private:
  __device__ __forceinline__ void load_queries(Stage& stage, int tile) {
    const int64_t first_query = int64_t{tile} * kTile.queries;
    const int64_t row = item.sequence.query_begin + first_query;
    const int count = static_cast<int>(min(item.sequence.num_queries - first_query, int64_t{kTile.queries}));
    const auto* q = p.q.row<const Element>(item.sequence.batch, item.head, row);
    const auto* dout = p.dout.row<const Element>(item.sequence.batch, item.head, row);
    tile::copy_rows_async<kThreads>(stage.q, {q, p.q.row_stride, static_cast<int>(p.head_dim_qk)}, count);
    tile::copy_rows_async<kThreads>(stage.dout, {dout, p.dout.row_stride, static_cast<int>(p.head_dim_v)}, count);
    ptx::commit_copies();
    if (threadIdx.x < kTile.queries) {
      stage.statistics[threadIdx.x] = load_statistics(p, item, first_query + threadIdx.x);
    }
  }

  // Visits the query tiles that see the block's first and last key and those between, in ascending order.
  __device__ __forceinline__ void stream(const attention::Interval& first, const attention::Interval& last) {
    const int first_tile = static_cast<int>(first.begin / kTile.queries);
    const int end_tile = static_cast<int>((last.end + kTile.queries - 1) / kTile.queries);
    // Every key is seen by every query of tiles [full_begin, full_end). Keys past the sequence's end hold zeros and
    // are not stored, so only the queries' end matters.
    const int full_begin = static_cast<int>((last.begin + kTile.queries - 1) / kTile.queries);
    const int full_end = static_cast<int>(first.end / kTile.queries);
    __syncthreads();  // the last head's readers are done
    load_queries(shared.stages[first_tile % 2], first_tile);
    for (int tile = first_tile; tile < end_tile; ++tile) {
      Stage& stage = shared.stages[tile % 2];
      ptx::wait_copies<0>();
      __syncthreads();  // this stage has arrived, and the other's readers are done
      if (tile + 1 < end_tile) load_queries(shared.stages[(tile + 1) % 2], tile + 1);
      Scores scores;
      Scores gradients;
      scores.clear();
      gradients.clear();
      tile::multiply_rows(scores, shared.k, tile::warp() * kRowsPerWarp, stage.q);
      if constexpr (kWantDk) tile::multiply_rows(gradients, shared.v, tile::warp() * kRowsPerWarp, stage.dout);
      const ScoreTile<Rows::kKeys, Scores> where = {p, item, first_key + tile::warp() * kRowsPerWarp,
                                                    int64_t{tile} * kTile.queries};
      const auto statistics = [&](int, int column) -> const QueryStatistics& { return stage.statistics[column]; };
      if (tile >= full_begin && tile < full_end) {
        differentiate<Differentiation<Traits::kScore, false, GradientOf::kProduct>>(scores, gradients, where,
                                                                                    statistics);
      } else {
        differentiate<Differentiation<Traits::kScore, true, GradientOf::kProduct>>(scores, gradients, where,
                                                                                   statistics);
      }
      if constexpr (kWantDv) tile::multiply_registers(dv, scores, stage.dout);
      if constexpr (kWantDk) tile::multiply_registers(dk, gradients, stage.q);
    }
  }

  __device__ __forceinline__ void store(const attention::MatrixView& view, const Gradient& gradient, int head_dim,
                                        float factor) {
#pragma unroll
    for (int r = 0; r < Gradient::kThreadRows; ++r) {
      const int64_t key = first_key + tile::warp() * kRowsPerWarp + Gradient::row(r);
      if (key >= item.sequence.num_keys) continue;
      Element* target = view.row<Element>(item.sequence.batch, item.key_head, item.sequence.key_begin + key);
      store_row<Element>({target, head_dim, view.column_stride}, gradient, r, factor);
    }
  }
};

// Block index -> (batch, key head, tile), tiles of one head next to each other so that its Q and dO stay in L2.
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads)
    backward_dkdv_kernel(const __grid_constant__ attention::BackwardParams p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const int64_t tiles = (p.sequences.max_seqlen_k + Kernel::kTile.keys - 1) / Kernel::kTile.keys;
  const int64_t head_index = blockIdx.x / tiles;
  const int64_t key_head = head_index % p.num_heads_k;
  const WorkItem item = {p.sequences.at(head_index / p.num_heads_k), 0, key_head};
  const int64_t first_key = blockIdx.x % tiles * Kernel::kTile.keys;
  if (first_key >= item.sequence.num_keys) return;
  Kernel kernel = {p, *reinterpret_cast<typename Kernel::Shared*>(shared_memory), item, first_key};
  kernel.run();
}

}  // namespace flash_attn_ext::sm80
