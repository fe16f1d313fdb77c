// dQ, dK and dV of short heads with a bias, in one kernel: backward_fused.cuh with a bias for each query and key, and a
// mask that may hide keys, the same ones from all queries.
//
// Grid: one CTA per (batch, head), which has all keys. Each warp owns 32 keys: its rows of S^T = K Q^T and dP^T = V
// dO^T are accumulators, and dV += P^T dO and dK += dS^T Q read P and dS from there, 16 queries at a time. dS also goes
// to shared memory, from which the warps compute 64 rows of dQ = scale * dS K at a time. A warp whose keys are all
// hidden skips its GEMMs, and dQ skips these keys. Shared memory: K, V, two stages of 32 rows of Q, dO and the bias, dS
// of 64 queries, the statistics of all queries, and where threads copy from. ldmatrix transposes the tile of the bias.
// Bound: shared memory.
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
#include "kernels/sm80/sm80_kernels.h"
#include "ptx/dependent_launch.h"
#include "ptx/pin.h"
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
  // What a thread copies of the next query tile: of the bias, and of Q or dO.
  struct alignas(16) Sources {
    const Element* bias;
    const Element* rows;
  };
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
    Sources sources[kThreads];
    uint32_t unmasked[kWarps];  // the bits of the mask's keys
    bool found_nan;
  };

  const BackwardParams& p;
  const float scale;  // a constant operand of the instructions that use it
  Shared& shared;
  const int batch;
  const int head;
  KeyGradients dk;
  KeyGradients dv;

  __device__ __forceinline__ void run() {
    const int tiles = attention::ceil_div(num_queries(), kQueries);
    load_keys(shared.k, p.k, p.head_dim_qk);
    load_keys(shared.v, p.v, p.head_dim_v);
    begin_at_first_query();
#pragma unroll
    for (int tile = 0; tile < kStages; ++tile) {
      if (tile < tiles) load_queries(tile);
    }
    ptx::commit_copies();
    const int attends = lane_key_is_unmasked(p, {{batch, 0, 0, num_queries(), num_keys()}, head, head}, first_key());
    share_statistics();
    const uint32_t own = __ballot_sync(0xFFFFFFFFu, attends);
    if (tile::lane() == 0) shared.unmasked[tile::warp()] = own;
    if (threadIdx.x == 0) shared.found_nan = false;
    dk.clear();
    dv.clear();
    iterate(tiles);
    dk.scale(scale);
    store_keys(p.dv, dv, p.head_dim_v);
    store_keys(p.dk, dk, p.head_dim_qk);
    // A NaN may be a weight of 0 times a NaN or infinity: the rows of such a head are recomputed without tensor cores.
    __syncthreads();
    const int64_t place = head * p.batch + batch;
    if (tile::lane() == 0) p.dq_nan_flags[place * kWarps + tile::warp()] = shared.found_nan;
  }

 private:
  __device__ __forceinline__ int num_keys() const { return static_cast<int>(p.sequences.max_seqlen_k); }
  __device__ __forceinline__ int num_queries() const { return static_cast<int>(p.sequences.max_seqlen_q); }
  // The first key of the warp, and of the thread. Unsigned divisions leave more registers than signed ones.
  __device__ __forceinline__ static int first_key() { return static_cast<int>(threadIdx.x / kWarpSize * kKeysPerWarp); }
  __device__ __forceinline__ static int thread_key() {
    return static_cast<int>(threadIdx.x / kWarpSize * kKeysPerWarp + threadIdx.x % kWarpSize / 4);
  }

  __device__ __forceinline__ void load_keys(KeyTile& tile, const attention::MatrixView& view, int64_t columns) const {
    const auto* source = view.row<const Element>(batch, head, 0);
    tile::copy_sequence_async<kThreads>(tile, {source, view.row_stride, static_cast<int>(columns)}, num_keys());
  }

  // What a thread copies of each query tile: a chunk of every kWarps-th row of the bias, and one of Q or dO. Its places
  // are computed again for each tile, since dK and dV leave no registers for them.
  struct Copies {
    static constexpr int kRowChunks = kShortBiasHeadDim / QueryTile::kChunk;
    static_assert(kThreads == 2 * kQueries * kRowChunks);

    const uint32_t thread = static_cast<uint32_t>(ptx::pin(static_cast<int>(threadIdx.x)));
    const int bias_row = static_cast<int>(thread / kWarpSize);
    const int bias_column = static_cast<int>(thread % kWarpSize) * BiasTile::kChunk;
    const bool are_of_dout = thread >= kThreads / 2;
    const int row = static_cast<int>(thread % (kThreads / 2) / kRowChunks);
    const int column = static_cast<int>(thread % kRowChunks) * QueryTile::kChunk;

    __device__ __forceinline__ static uint32_t bytes(int64_t columns, int first) {
      return static_cast<uint32_t>(min(max(static_cast<int>(columns) - first, 0), BiasTile::kChunk)) * sizeof(Element);
    }
  };

  __device__ __forceinline__ void begin_at_first_query() {
    const Copies own;
    const attention::BroadcastView& bias = p.score_mod.bias;
    const attention::MatrixView& view = own.are_of_dout ? p.dout : p.q;
    shared.sources[own.thread] = {
        static_cast<const Element*>(bias.data) + bias.offset({batch, head, own.bias_row, 0}) + own.bias_column,
        view.row<const Element>(batch, head, own.row) + own.column};
  }

  // Issues the copies of the next query tile, zero-padded.
  __device__ __forceinline__ void load_queries(int tile) {
    const Copies own;
    Stage& stage = shared.stages[tile % kStages];
    Sources& sources = shared.sources[own.thread];
    const Sources from = sources;
    const int rows = num_queries() - tile * kQueries;
    const int64_t stride = p.score_mod.bias.query_stride;
    const uint32_t bias_bytes = Copies::bytes(num_keys(), own.bias_column);
    const uint32_t target = stage.bias.address(own.bias_row, own.bias_column);
    static_assert(kWarps == 8 && kShortBiasTokens == kWarpSize * BiasTile::kChunk);  // the swizzle repeats
#pragma unroll
    for (int row = 0; row < kQueries; row += kWarps) {
      ptx::copy_async_16(target + row * BiasTile::kRowBytes, from.bias + row * stride,
                         own.bias_row + row < rows ? bias_bytes : 0);
    }
    const uint32_t bytes = Copies::bytes(own.are_of_dout ? p.head_dim_v : p.head_dim_qk, own.column);
    ptx::copy_async_16((own.are_of_dout ? stage.dout : stage.q).address(own.row, own.column), from.rows,
                       own.row < rows ? bytes : 0);
    sources = {from.bias + kQueries * stride, from.rows + kQueries * (own.are_of_dout ? p.dout : p.q).row_stride};
  }

  // Each thread computes delta = rowsum(dO ∘ O) − dLSE of a query, and writes it for other kernels, too. All loads are
  // in flight together: threads past the end read the last query.
  __device__ __forceinline__ void share_statistics() {
    using Chunk = common::Chunk<Element>;
    constexpr int kChunks = kShortBiasHeadDim / Chunk::kCount;
    const bool exists = static_cast<int>(threadIdx.x) < num_queries();
    const int query = exists ? static_cast<int>(threadIdx.x) : num_queries() - 1;
    const auto* out = p.out.row<const Element>(batch, head, query);
    const auto* dout = p.dout.row<const Element>(batch, head, query);
    Chunk outs[kChunks] = {};
    Chunk douts[kChunks] = {};
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      if (i * Chunk::kCount >= p.head_dim_v) continue;
      outs[i] = reinterpret_cast<const Chunk*>(out)[i];
      douts[i] = reinterpret_cast<const Chunk*>(dout)[i];
    }
    const float lse = *p.lse.at<const float>(batch, head, query);
    const auto optional = [&](const attention::StatisticView& view) {
      return view.present() ? *view.at<const float>(batch, head, query) : 0.0f;
    };
    const float residual = optional(p.lse_residual);
    const float dlse = optional(p.dlse);
    float delta = 0.0f;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) delta = common::add_product(delta, outs[i], douts[i]);
    delta -= dlse;
    if (exists) *p.delta.at<float>(batch, head, query) = delta;
    shared.statistics[threadIdx.x] = {
        query_statistics<true>(exists ? lse : -INFINITY, exists ? delta : 0.0f, residual)};
  }

  // The mainloop over query tiles, in ascending order.
  __device__ __forceinline__ void iterate(int tiles) {
    for (int tile = 0;; ++tile) {
      ptx::wait_copies<0>();
      __syncthreads();  // the tile has arrived, dS of the preceding one is complete, and no warp reads its stage
      if (tile > 0 && tile + 1 < tiles) load_queries(tile + 1);
      ptx::commit_copies();
      const bool begins_dq = tile * kQueries % kDqQueries == 0;
      if (tile > 0 && (begins_dq || tile == tiles)) compute_dq((tile - 1) * kQueries / kDqQueries);
      if (tile == tiles) break;
      add_queries(tile, /*waits=*/begins_dq && tile > 0);
    }
  }

  // Adds a query tile to dK and dV, and computes its dS. waits: until no warp reads dS of other queries any more. Warps
  // reach this barrier from different branches.
  __device__ __forceinline__ void add_queries(int tile, bool waits) {
    const uint32_t own = shared.unmasked[tile::warp()];
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
          // Selects 0 instead of multiplying by it, since a NaN must not reach what does not attend to it. A NaN times
          // a weight of 0 makes NaN of gradients, which are then recomputed.
          const bool hidden = kMasked && (own >> Scores::row(r) & 1) == 0;
          scores.at(r, j, e) = hidden ? 0.0f : probability;
          gradients.at(r, j, e) = hidden ? 0.0f : gradient;
        }
      }
    }
  }

  __device__ __forceinline__ void store_dscores(const Scores& gradients, int first_column) {
    const tile::LaneAddress<DscoreTile> own(shared.dscores, thread_key(), static_cast<int>(threadIdx.x % 4 * 2));
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
  __device__ __forceinline__ void compute_dq(int group) {
    const uint32_t warps_with_keys = __ballot_sync(0xFFFFFFFFu, shared.unmasked[tile::lane() % kWarps] != 0);
    const auto warp = static_cast<uint32_t>(ptx::pin(tile::warp()));  // what follows from it is not kept
    const int first_row = static_cast<int>(warp % kRowWarps) * 16;
    const int first_column = static_cast<int>(warp / kRowWarps) * 16;
    const int query = group * kDqQueries + first_row;
    if (p.dq.data == nullptr || query >= num_queries()) return;
    const tile::LeftOperandColumns<DscoreTile> dscores(shared.dscores, first_row);
    const tile::RightOperandColumns<KeyTile> k(shared.k, first_column);
    QueryGradients sums[2];  // of every second 16 keys, so that four accumulation chains are in flight
    for (QueryGradients& sum : sums) sum.clear();
#pragma unroll 2
    for (int other = 0; other < kWarps; ++other) {
      if ((warps_with_keys >> other & 1) == 0) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t a[4];
        uint32_t b[4];
        dscores.load(a, 0, other * kKeysPerWarp + 16 * i);
        k.load(b, other * kKeysPerWarp + 16 * i, 0);
        tile::multiply_step<Element>(sums[i].c[0][0], a, b[0], b[1]);
        tile::multiply_step<Element>(sums[i].c[0][1], a, b[2], b[3]);
      }
    }
    QueryGradients& dq = sums[0];
    dq.add(sums[1]);
    if (dq.has_nan()) shared.found_nan = true;
    dq.scale(scale);
    store_whole_quads<Element>({.data = p.dq.row<Element>(batch, head, query) + first_column,
                                .row_stride = p.dq.row_stride,
                                .column_stride = p.dq.column_stride,
                                .rows = num_queries() - query,
                                .columns = static_cast<int>(p.head_dim_qk) - first_column},
                               dq);
  }

  __device__ __forceinline__ void store_keys(const attention::MatrixView& view, const KeyGradients& gradients,
                                             int64_t head_dim) {
    if (view.data == nullptr || first_key() >= num_keys()) return;
    const OutputRows<Element> target = {.data = view.row<Element>(batch, head, first_key()),
                                        .row_stride = view.row_stride,
                                        .column_stride = view.column_stride,
                                        .rows = num_keys() - first_key(),
                                        .columns = static_cast<int>(head_dim)};
    if (store_row_chunks(target, gradients)) shared.found_nan = true;
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, kShortBiasCtas)
    backward_short_bias_kernel(const __grid_constant__ BackwardParams p, const float scale) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  ptx::wait_for_kernel_before();
  ptx::allow_dependent_launch();
  const auto heads = static_cast<unsigned>(p.num_heads_q);
  Kernel kernel = {p, scale, *reinterpret_cast<typename Kernel::Shared*>(shared_memory),
                   static_cast<int>(blockIdx.x / heads), static_cast<int>(blockIdx.x % heads)};
  kernel.run();
}

template <class Element>
cudaError_t backward_short_bias(const BackwardParams& p, cudaStream_t stream) {
  using Kernel = BackwardShortBiasKernel<Element>;
  static_assert(sizeof(typename Kernel::Shared) <= kShortBiasSharedBytes);
  const cudaError_t error = common::launch_blocks_early<Kernel>(
      backward_short_bias_kernel<Kernel>, p.batch * p.num_heads_q, stream, p, static_cast<float>(p.score_mod.scale));
  if (error != cudaSuccess) return error;
  const auto flagged = [&](Rows rows) {
    return common::rows_in_order_of_heads(p, p.dq_nan_flags, rows, kShortBiasTokens, Kernel::kKeysPerWarp);
  };
  return common::repair_gradients<Element>(p, flagged(Rows::kQueries), flagged(Rows::kKeys), stream);
}

}  // namespace flash_attn_ext::sm80
