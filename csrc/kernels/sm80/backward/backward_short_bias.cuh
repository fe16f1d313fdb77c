// dQ, dK and dV of short heads with a bias, in one kernel: backward_fused.cuh with a bias for each query and key, and a
// mask that may hide keys, the same ones from all queries.
//
// Grid: one CTA per (batch, head), which has all keys. Each warp owns 32 keys: its rows of S^T = K Q^T and dP^T = V
// dO^T are accumulators, and dV += P^T dO and dK += dS^T Q read P and dS from there, 16 queries at a time. dS also goes
// to shared memory, from which the warps compute 64 rows of dQ = scale * dS K at a time. A warp whose keys are all
// hidden skips its GEMMs, and dQ skips these keys. Shared memory: K, V, two stages of 32 rows of Q, dO and the bias, dS
// of 64 queries, and the statistics of all queries. ldmatrix transposes the tile of the bias. Bound: shared memory.
#pragma once

#include "attention/division.h"
#include "kernels/common/launch/launch_early.cuh"
#include "kernels/common/repair/repair.h"
#include "kernels/common/rows/row_products.cuh"
#include "kernels/config/short_bias.h"
#include "kernels/epilogue/store_quads.cuh"
#include "kernels/score/key_mask_words.cuh"
#include "kernels/score/score_gradient.cuh"
#include "kernels/sm80/launch.cuh"
#include "kernels/sm80/short_bias.h"
#include "kernels/sm80/stationary_bias.cuh"
#include "ptx/dependent_launch.h"
#include "tile/sm80/copy_rows.h"
#include "tile/sm80/gemm.h"
#include "tile/sm80/gemm_transposed.h"

namespace flash_attn_ext::sm80 {

template <class ElementType>
struct BackwardShortBiasKernel {
  using Element = ElementType;
  static constexpr int kKeysPerWarp = 32;
  static constexpr int kWarps = kShortBiasTokens / kKeysPerWarp;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kQueries = 32;       // of a stage
  static constexpr int kScoreQueries = 16;  // whose scores registers hold
  static constexpr int kDqQueries = 64;     // whose dS shared memory holds
  static constexpr int kStages = 2;
  static_assert(kThreads == kShortBiasTokens);  // each thread has a query's statistics

  using KeyTile = tile::SharedTile<Element, kShortBiasTokens, kShortBiasHeadDim>;
  using QueryTile = tile::SharedTile<Element, kQueries, kShortBiasHeadDim>;
  using BiasTile = tile::SharedTile<Element, kQueries, kShortBiasTokens>;
  using DscoreTile = tile::SharedTile<Element, kShortBiasTokens, kDqQueries>;
  using Scores = tile::Accumulator<kKeysPerWarp / 16, kScoreQueries / 8>;
  using KeyGradients = tile::Accumulator<kKeysPerWarp / 16, kShortBiasHeadDim / 8>;
  // A warp's share of dQ has 16 rows and 16 columns.
  static constexpr int kRowWarps = kDqQueries / 16;
  using QueryGradients = tile::Accumulator<1, 2>;

  struct alignas(16) Statistics : QueryStatistics {};
  struct Stage {
    QueryTile q;
    QueryTile dout;
    BiasTile bias;
  };
  struct Shared {
    KeyTile k;
    KeyTile v;
    Stage stages[kStages];
    DscoreTile dscores;
    Statistics statistics[kShortBiasTokens];
    uint32_t left[kWarps];  // of the mask's keys
  };

  const BackwardParams& p;
  Shared& shared;
  const int batch;
  const int head;
  KeyGradients dk;
  KeyGradients dv;
  bool found_nan;

  __device__ __forceinline__ void run() {
    const int tiles = attention::ceil_div(num_queries(), kQueries);
    load_keys();
#pragma unroll
    for (int tile = 0; tile < kStages; ++tile) {
      if (tile < tiles) load_queries(tile);
    }
    ptx::commit_copies();
    const uint32_t own = __ballot_sync(
        0xFFFFFFFFu, attends_lane_key(p, {{batch, 0, 0, num_queries(), num_keys()}, head, head}, first_key()));
    if (tile::lane() == 0) shared.left[tile::warp()] = own;
    share_statistics();
    dk.clear();
    dv.clear();
    found_nan = false;
    iterate(tiles, own);
    dk.scale(static_cast<float>(p.score_mod.scale));
    store_keys(p.dv, dv, p.head_dim_v);
    store_keys(p.dk, dk, p.head_dim_qk);
    // A NaN may be a weight of 0 times a NaN or infinity: the rows of such a head are recomputed without tensor cores.
    const bool any = __syncthreads_or(found_nan);
    const int64_t place = head * p.batch + batch;
    if (tile::lane() == 0) p.dq_nan_flags[place * kWarps + tile::warp()] = any;
  }

 private:
  __device__ __forceinline__ int num_keys() const { return static_cast<int>(p.sequences.max_seqlen_k); }
  __device__ __forceinline__ int num_queries() const { return static_cast<int>(p.sequences.max_seqlen_q); }
  __device__ __forceinline__ static int first_key() { return tile::warp() * kKeysPerWarp; }  // of the warp

  template <class Tile>
  __device__ __forceinline__ void copy(Tile& tile, const attention::MatrixView& view, int first, int64_t columns,
                                       int rows) const {
    const auto* source = view.row<const Element>(batch, head, first);
    copy_sequence_async<kThreads>(tile, {source, view.row_stride, static_cast<int>(columns)}, rows);
  }

  __device__ __forceinline__ void load_keys() {
    copy(shared.k, p.k, 0, p.head_dim_qk, num_keys());
    copy(shared.v, p.v, 0, p.head_dim_v, num_keys());
  }

  // Issues the copies of a query tile, zero-padded. A warp copies rows of the bias, and half of the threads Q or dO.
  __device__ __forceinline__ void load_queries(int tile) {
    Stage& stage = shared.stages[tile % kStages];
    constexpr auto kBytes = static_cast<uint32_t>(sizeof(Element));
    const int first = tile * kQueries;
    const auto bytes_of = [](int64_t columns, int column) {
      return static_cast<uint32_t>(min(max(static_cast<int>(columns) - column, 0), BiasTile::kChunk)) * kBytes;
    };
    const attention::BroadcastView& bias = p.score_mod.bias;
    const int key = tile::lane() * BiasTile::kChunk;
    const uint32_t bias_bytes = bytes_of(num_keys(), key);
    const auto* source =
        static_cast<const Element*>(bias.data) + bias.offset({batch, head, first + tile::warp(), 0}) + key;
    const uint32_t target = stage.bias.address(tile::warp(), key);
    static_assert(kWarps == 8 && kShortBiasTokens == kWarpSize * BiasTile::kChunk);  // the swizzle repeats
#pragma unroll
    for (int row = 0; row < kQueries; row += kWarps) {
      const bool exists = first + tile::warp() + row < num_queries();
      ptx::copy_async_16(target + row * BiasTile::kRowBytes, source + row * bias.query_stride, exists ? bias_bytes : 0);
    }
    constexpr int kChunks = kShortBiasHeadDim / QueryTile::kChunk;
    static_assert(kThreads == 2 * kQueries * kChunks);
    const bool is_dout = static_cast<int>(threadIdx.x) >= kThreads / 2;
    const int row = static_cast<int>(threadIdx.x) % (kThreads / 2) / kChunks;
    const int column = static_cast<int>(threadIdx.x) % kChunks * QueryTile::kChunk;
    const attention::MatrixView& view = is_dout ? p.dout : p.q;
    const uint32_t bytes = bytes_of(is_dout ? p.head_dim_v : p.head_dim_qk, column);
    ptx::copy_async_16((is_dout ? stage.dout : stage.q).address(row, column),
                       view.row<const Element>(batch, head, first + row) + column,
                       first + row < num_queries() ? bytes : 0);
  }

  // Each thread computes delta = rowsum(dO ∘ O) − dLSE of a query, and writes it for other kernels, too.
  __device__ __forceinline__ void share_statistics() {
    using Chunk = common::Chunk<Element>;
    const auto query = static_cast<int>(threadIdx.x);
    float lse = -INFINITY;
    float residual = 0.0f;
    float delta = 0.0f;
    if (query < num_queries()) {
      const auto* out = p.out.row<const Element>(batch, head, query);
      const auto* dout = p.dout.row<const Element>(batch, head, query);
#pragma unroll
      for (int column = 0; column < kShortBiasHeadDim; column += Chunk::kCount) {
        if (column >= p.head_dim_v) break;
        delta = common::add_product(delta, *reinterpret_cast<const Chunk*>(out + column),
                                    *reinterpret_cast<const Chunk*>(dout + column));
      }
      lse = *p.lse.at<const float>(batch, head, query);
      if (p.lse_residual.present()) residual = *p.lse_residual.at<const float>(batch, head, query);
      if (p.dlse.present()) delta -= *p.dlse.at<const float>(batch, head, query);
      *p.delta.at<float>(batch, head, query) = delta;
    }
    shared.statistics[query] = {query_statistics<true>(lse, delta, residual)};
  }

  // The mainloop over query tiles, in ascending order.
  __device__ __forceinline__ void iterate(int tiles, uint32_t own) {
    uint32_t warps_with_keys = 0;
    for (int tile = 0;; ++tile) {
      ptx::wait_copies<0>();
      __syncthreads();  // the tile has arrived, dS of the preceding one is complete, and no warp reads its stage
      if (tile == 0) warps_with_keys = __ballot_sync(0xFFFFFFFFu, shared.left[tile::lane() % kWarps] != 0);
      if (tile > 0 && tile + 1 < tiles) load_queries(tile + 1);
      ptx::commit_copies();
      const bool begins_dq = tile * kQueries % kDqQueries == 0;
      if (tile > 0 && (begins_dq || tile == tiles))
        compute_dq((tile - 1) * kQueries / kDqQueries, tiles, warps_with_keys);
      if (tile == tiles) break;
      add_queries(tile, own, /*waits=*/begins_dq && tile > 0);
    }
  }

  // Adds a query tile to dK and dV, and computes its dS. waits: until no warp reads dS of other queries any more. Warps
  // reach this barrier from different branches.
  __device__ __forceinline__ void add_queries(int tile, uint32_t own, bool waits) {
    if (own == 0) {
      if (waits) __syncthreads();
      return;
    }
    const Stage& stage = shared.stages[tile % kStages];
#pragma unroll 1
    for (int first = 0; first < kQueries; first += kScoreQueries) {
      const auto& q = stage.q.template rows_from<kScoreQueries>(first);
      const auto& dout = stage.dout.template rows_from<kScoreQueries>(first);
      Scores scores;
      Scores gradients;
      scores.clear();
      gradients.clear();
      tile::multiply_head_dims(scores, shared.k, first_key(), q);
      tile::multiply_head_dims(gradients, shared.v, first_key(), dout);
      const int query = tile * kQueries + first;
      if (own == 0xFFFFFFFFu) {
        differentiate<false>(scores, gradients, stage.bias, query, own);
      } else {
        differentiate<true>(scores, gradients, stage.bias, query, own);
      }
      if (waits && first == 0) __syncthreads();
      store_dscores(gradients, query % kDqQueries);
      tile::multiply_registers(dv, scores, dout);
      tile::multiply_registers(dk, gradients, q);
    }
  }

  // Turns q.k into P, and dP into dS, of the queries from first_query on.
  template <bool kMasked>
  __device__ __forceinline__ void differentiate(Scores& scores, Scores& gradients, const BiasTile& bias,
                                                int first_query, uint32_t own) const {
    const auto scale = static_cast<float>(p.score_mod.scale);
    // ldmatrix transposes four blocks of 8 queries x 8 keys, one for each of the thread's rows.
    static_assert(Scores::kThreadRows == 4);
    const tile::LaneAddress<BiasTile> blocks(bias, tile::lane() % 8, first_key() + tile::lane() / 8 * 8);
#pragma unroll
    for (int j = 0; j < Scores::kColumnTiles; ++j) {
      uint32_t words[4];
      ptx::load_matrix_x4_transposed(words, blocks.at(first_query % kQueries + 8 * j, 0));
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const QueryStatistics query = shared.statistics[first_query + Scores::column(j, e)];
#pragma unroll
        for (int r = 0; r < Scores::kThreadRows; ++r) {
          const float2 added = ptx::unpack(words[r], Element{});
          // Subtracts first, since scores may be as low as the smallest finite number.
          const float above = fmaf(scores.at(r, j, e), scale, e == 0 ? added.x : added.y) - query.lse;
          const float probability = ptx::exp2(above * kLog2e - query.residual);
          const float gradient = probability * (gradients.at(r, j, e) - query.delta);
          // Selects 0 instead of multiplying by it, since a NaN must not reach what does not attend to it.
          const bool hidden = kMasked && (own >> Scores::row(r) & 1) == 0;
          scores.at(r, j, e) = hidden ? 0.0f : probability;
          gradients.at(r, j, e) = hidden || probability == 0.0f ? 0.0f : gradient;
        }
      }
    }
  }

  __device__ __forceinline__ void store_dscores(const Scores& gradients, int first_column) {
    const tile::LaneAddress<DscoreTile> own(shared.dscores, first_key() + Scores::row(0), Scores::column(0, 0));
#pragma unroll
    for (int r = 0; r < Scores::kThreadRows; ++r) {
#pragma unroll
      for (int j = 0; j < Scores::kColumnTiles; ++j) {
        tile::store_shared_pair<Element>(own.at(Scores::row_step(r), first_column + 8 * j), gradients.at(r, j, 0),
                                         gradients.at(r, j, 1));
      }
    }
  }

  // Computes dQ of kDqQueries queries whose dS is complete.
  __device__ __forceinline__ void compute_dq(int group, int tiles, uint32_t warps_with_keys) {
    const int first_row = tile::warp() % kRowWarps * 16;
    const int first_column = tile::warp() / kRowWarps * 16;
    const int query = group * kDqQueries + first_row;
    if (p.dq.data == nullptr || query >= tiles * kQueries) return;
    const tile::LeftOperandColumns<DscoreTile> dscores(shared.dscores, first_row);
    const tile::RightOperandColumns<KeyTile> k(shared.k, first_column);
    QueryGradients sums[2];  // of every second 16 keys, so that four accumulation chains are in flight
    for (QueryGradients& sum : sums) sum.clear();
#pragma unroll 2
    for (int warp = 0; warp < kWarps; ++warp) {
      if ((warps_with_keys >> warp & 1) == 0) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t a[4];
        uint32_t b[4];
        dscores.load(a, 0, warp * kKeysPerWarp + 16 * i);
        k.load(b, warp * kKeysPerWarp + 16 * i, 0);
        tile::multiply_step<Element>(sums[i].c[0][0], a, b[0], b[1]);
        tile::multiply_step<Element>(sums[i].c[0][1], a, b[2], b[3]);
      }
    }
    QueryGradients& dq = sums[0];
    dq.add(sums[1]);
    found_nan |= dq.has_nan();
    dq.scale(static_cast<float>(p.score_mod.scale));
    store_quads<Element>({.data = p.dq.row<Element>(batch, head, query) + first_column,
                          .row_stride = p.dq.row_stride,
                          .column_stride = p.dq.column_stride,
                          .rows = num_queries() - query,
                          .columns = static_cast<int>(p.head_dim_qk) - first_column},
                         dq);
  }

  __device__ __forceinline__ void store_keys(const attention::MatrixView& view, const KeyGradients& gradients,
                                             int64_t head_dim) {
    if (view.data == nullptr || first_key() >= num_keys()) return;
    found_nan |= store_row_chunks<Element>({.data = view.row<Element>(batch, head, first_key()),
                                            .row_stride = view.row_stride,
                                            .column_stride = view.column_stride,
                                            .rows = num_keys() - first_key(),
                                            .columns = static_cast<int>(head_dim)},
                                           gradients);
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, kShortBiasCtas)
    backward_short_bias_kernel(const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  ptx::wait_for_kernel_before();
  ptx::allow_dependent_launch();
  const auto heads = static_cast<unsigned>(p.num_heads_q);
  Kernel kernel = {p, *reinterpret_cast<typename Kernel::Shared*>(shared_memory), static_cast<int>(blockIdx.x / heads),
                   static_cast<int>(blockIdx.x % heads)};
  kernel.run();
}

template <class Element>
cudaError_t backward_short_bias(const BackwardParams& p, cudaStream_t stream) {
  using Kernel = BackwardShortBiasKernel<Element>;
  static_assert(sizeof(typename Kernel::Shared) <= kShortBiasSharedBytes);
  const cudaError_t error =
      common::launch_blocks_early<Kernel>(backward_short_bias_kernel<Kernel>, p.batch * p.num_heads_q, stream, p);
  if (error != cudaSuccess) return error;
  const auto flagged = [&](Rows rows) {
    return common::rows_in_order_of_heads(p, p.dq_nan_flags, rows, kShortBiasTokens, Kernel::kKeysPerWarp);
  };
  return common::repair_gradients<Element>(p, flagged(Rows::kQueries), flagged(Rows::kKeys), stream);
}

}  // namespace flash_attn_ext::sm80
