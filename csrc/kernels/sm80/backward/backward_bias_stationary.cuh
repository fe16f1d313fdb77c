// dQ, dK, dV and dBias of many short sequences whose heads have one bias for all batch entries, such as the windows of
// Swin.
//
// Grid: persistent CTAs. Each has one head and a share of the batch entries (BatchEntries), and one tile holds all
// queries and keys of a sequence, as in forward_bias_stationary.cuh. Each warp owns 16 keys: its rows of S^T = K Q^T
// and dP^T = V dO^T are accumulators, and dV += P^T dO and dK += dS^T Q read P and dS from there. dS also goes to
// shared memory, from which each warp computes 16 rows of dQ = scale * dS K.
//
// dBias is the sum of dS over batch entries. Each thread keeps the sums of its scores in registers, and writes them
// once, at the end. sum_dbias_partials_kernel adds those of the CTAs of a head in a fixed order.
//
// Shared memory: the bias, two stages of Q, K, V, O, dO and mask bits, the statistics of the queries, and dS. There are
// three barriers for each sequence: its loads have arrived, its statistics are complete, and its dS is complete.
#pragma once

#include "attention/division.h"
#include "kernels/common/launch/launch_early.cuh"
#include "kernels/common/repair/repair.h"
#include "kernels/common/rows/row_products.cuh"
#include "kernels/epilogue/store_dbias.cuh"
#include "kernels/epilogue/store_quads.cuh"
#include "kernels/score/score_gradient.cuh"
#include "kernels/sm80/launch.cuh"
#include "kernels/sm80/nan_flags.cuh"
#include "kernels/sm80/sm80_kernels.h"
#include "kernels/sm80/stationary_bias.cuh"
#include "ptx/dependent_launch.h"
#include "tile/sm80/copy_rows.h"
#include "tile/sm80/gemm.h"
#include "tile/sm80/gemm_transposed.h"

namespace flash_attn_ext::sm80 {

template <class ElementType, BiasStationaryConfig kConfig>
struct BackwardBiasStationaryKernel {
  using Element = ElementType;
  static constexpr TileShape kTile = kConfig.tile;
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kCtasPerSm = kConfig.ctas_per_sm_backward;
  static constexpr int kThreads = kTile.warps * kWarpSize;
  static constexpr int kRowsPerWarp = kTile.keys / kTile.warps;

  using Tile = tile::SharedTile<Element, kBiasStationaryTokens, kHeadDim>;
  using DscoreTile = tile::SharedTile<Element, kTile.keys, kTile.queries>;
  using Scores = tile::Accumulator<kRowsPerWarp / 16, kTile.queries / 8>;
  using Gradients = tile::Accumulator<kRowsPerWarp / 16, kHeadDim / 8>;  // of keys, or of queries
  using Bias = StationaryBias<Element, Scores, kThreads>;
  using Chunk = common::Chunk<Element>;

  struct Stage {
    Tile q;
    Tile k;
    Tile v;
    Tile out;
    Tile dout;
    StagedMaskBits mask;
  };
  struct Shared {
    Stage stages[2];
    Bias bias;
    DscoreTile dscores;
    QueryStatistics statistics[kBiasStationaryTokens];
  };

  // What the two threads that share a query read of it, while the preceding sequence is computed.
  struct Statistics {
    float lse;
    float residual;
  };

  const BackwardParams& p;
  Shared& shared;
  Scores dbias;

  __device__ __forceinline__ void run() {
    dbias.clear();
    iterate(batch_entries(p));
    if (p.dbias_partials != nullptr) store_dbias_partial();
  }

 private:
  __device__ __forceinline__ static int warp_row() { return tile::warp() * kRowsPerWarp; }
  static constexpr int kThreadsPerQuery = kThreads / kBiasStationaryTokens;
  __device__ __forceinline__ static int own_query() { return static_cast<int>(threadIdx.x) / kThreadsPerQuery; }

  __device__ __forceinline__ void iterate(const BatchEntries& entries) {
    const auto end = static_cast<int>(p.batch);
    load(shared.stages[0], item_at(p, entries.head, entries.first));
    Statistics next = load_statistics(item_at(p, entries.head, entries.first));
    const bool stays = p.score_mod.bias.batch_stride == 0;  // the bias of the head
    if (stays) load_bias(item_at(p, entries.head, entries.first));
    int current = 0;
    for (int entry = entries.first; entry < end; entry += entries.step) {
      const Statistics statistics = next;
      ptx::wait_copies<0>();
      __syncthreads();  // the sequence has arrived, and no warp reads the other stage, statistics or dS any more
      if (entry + entries.step < end) {
        const WorkItem item = item_at(p, entries.head, entry + entries.step);
        load(shared.stages[1 - current], item);
        next = load_statistics(item);
      }
      if (!stays) load_bias(item_at(p, entries.head, entry));
      compute(shared.stages[current], statistics, item_at(p, entries.head, entry));
      current = 1 - current;
    }
  }

  __device__ __forceinline__ void load_bias(const WorkItem& item) {
    shared.bias.load(ScoreTile<Rows::kKeys, Scores>{p, item, warp_row(), 0});
  }

  __device__ __forceinline__ void copy(Tile& tile, const attention::MatrixView& view, const WorkItem& item,
                                       int64_t head_dim, int64_t rows) const {
    const auto* first = view.row<const Element>(item.sequence.batch, item.head, 0);
    tile::copy_sequence_async<kThreads>(tile, {first, view.row_stride, static_cast<int>(head_dim)},
                                        static_cast<int>(rows));
  }

  __device__ __forceinline__ void load(Stage& stage, const WorkItem& item) const {
    copy(stage.q, p.q, item, p.head_dim_qk, item.sequence.num_queries);
    copy(stage.k, p.k, item, p.head_dim_qk, item.sequence.num_keys);
    copy(stage.v, p.v, item, p.head_dim_v, item.sequence.num_keys);
    copy(stage.dout, p.dout, item, p.head_dim_v, item.sequence.num_queries);
    copy(stage.out, p.out, item, p.head_dim_v, item.sequence.num_queries);
    stage.mask.load(p, item);
    ptx::commit_copies();
  }

  __device__ __forceinline__ Statistics load_statistics(const WorkItem& item) const {
    if (own_query() >= item.sequence.num_queries) return {.lse = -INFINITY, .residual = 0.0f};
    return {.lse = statistic(p.lse, item),
            .residual = p.lse_residual.present() ? statistic(p.lse_residual, item) : 0.0f};
  }
  __device__ __forceinline__ static float statistic(const attention::StatisticView& view, const WorkItem& item) {
    return *view.at<const float>(item.sequence.batch, item.head, own_query());
  }

  __device__ __forceinline__ void compute(Stage& stage, const Statistics& statistics, const WorkItem& item) {
    share_statistics(stage, statistics, item);
    __syncthreads();  // the statistics are complete
    Scores scores;
    Scores gradients;
    scores.clear();
    gradients.clear();
    tile::multiply_head_dims(scores, stage.k, warp_row(), stage.q);
    tile::multiply_head_dims(gradients, stage.v, warp_row(), stage.dout);
    differentiate(scores, gradients, stage.mask);
    dbias.add(gradients);
    store_dscores(gradients);
    const int64_t keys = item.sequence.num_keys;
    bool found_nan = false;
    const auto store_keys = [&](const attention::MatrixView& view, int64_t columns, const Scores& left,
                                const Tile& right, float scale) {
      if (view.data == nullptr) return;
      Gradients gradient;
      gradient.clear();
      tile::multiply_registers(gradient, left, right);
      gradient.scale(scale);
      found_nan |= store_row_chunks(rows_of(view, item, keys, columns), gradient);
    };
    const auto scale = static_cast<float>(p.score_mod.scale);
    store_keys(p.dk, p.head_dim_qk, gradients, stage.q, scale);
    store_keys(p.dv, p.head_dim_v, scores, stage.dout, 1.0f);
    __syncthreads();  // dS is complete
    if (p.dbias.per_batch) store_dbias_of(item);
    if (p.dq.data != nullptr) {
      Gradients dq;
      dq.clear();
      multiply_dscores(dq, stage.k);
      dq.scale(scale);
      found_nan |= store_row_chunks(rows_of(p.dq, item, item.sequence.num_queries, p.head_dim_qk), dq);
    }
    flag_nan_in_order_of_heads<kTile.warps>(p.dq_nan_flags, p, item, found_nan);
  }

  // The warp's rows of a gradient.
  __device__ __forceinline__ OutputRows<Element> rows_of(const attention::MatrixView& view, const WorkItem& item,
                                                         int64_t rows, int64_t columns) const {
    return {.data = view.row<Element>(item.sequence.batch, item.head, warp_row()),
            .row_stride = view.row_stride,
            .column_stride = view.column_stride,
            .rows = static_cast<int>(rows) - warp_row(),
            .columns = static_cast<int>(columns)};
  }

  // Computes delta = rowsum(dO ∘ O) − dLSE, and writes it for the repair kernel, too.
  __device__ __forceinline__ void share_statistics(const Stage& stage, const Statistics& own, const WorkItem& item) {
    constexpr int kColumns = kHeadDim / kThreadsPerQuery;
    const int own_part = static_cast<int>(threadIdx.x) % kThreadsPerQuery;
    float delta = 0.0f;
#pragma unroll
    for (int column = 0; column < kColumns; column += Chunk::kCount) {
      delta = common::add_product(delta, chunk_of(stage.out, own_part * kColumns + column),
                                  chunk_of(stage.dout, own_part * kColumns + column));
    }
    delta = tile::sum_over_lanes<kThreadsPerQuery>(delta);
    if (own_part != 0) return;
    if (own_query() < item.sequence.num_queries) {
      if (p.dlse.present()) delta -= statistic(p.dlse, item);
      *p.delta.at<float>(item.sequence.batch, item.head, own_query()) = delta;
    }
    shared.statistics[own_query()] = query_statistics<true>(own.lse, delta, own.residual);
  }
  __device__ __forceinline__ static Chunk chunk_of(const Tile& tile, int column) {
    return *reinterpret_cast<const Chunk*>(&tile.at(own_query(), column));
  }

  // Turns q.k into P, and dP into dS.
  __device__ __forceinline__ void differentiate(Scores& scores, Scores& gradients, const StagedMaskBits& mask) const {
    const auto scale = static_cast<float>(p.score_mod.scale);
    const bool masked = p.score_mod.mask_bits.present();
    // The word and the bit of the thread's keys, which are 8 apart, in a group of keys.
    const int key = warp_row() + Scores::row(0);
    const int word = key % 8 / 2;
    const uint32_t low_bit = 1u << (key / 8 * 2 + key % 2);
    shared.bias.for_each_pair([&](int r, int j, float low, float high) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float bias = e == 0 ? low : high;
        const int query = Scores::column(j, e);
        const QueryStatistics of_query = shared.statistics[query];
        // Subtracts first, since scores may be as low as the smallest finite number.
        const float above = fmaf(scores.at(r, j, e), scale, bias) - of_query.lse;
        const float probability = ptx::exp2(above * kLog2e - of_query.residual);
        const float gradient = probability * (gradients.at(r, j, e) - of_query.delta);
        bool hidden = bias == -INFINITY;
        if (masked) hidden |= (mask.word(query, word) & low_bit << (2 * r)) == 0;
        // Selects 0 instead of multiplying by it, since a NaN must not reach what does not attend to it.
        scores.at(r, j, e) = hidden ? 0.0f : probability;
        gradients.at(r, j, e) = hidden || probability == 0.0f ? 0.0f : gradient;
      }
    });
  }

  __device__ __forceinline__ void store_dscores(const Scores& dscores) const {
    const tile::LaneAddress<DscoreTile> own(shared.dscores, warp_row() + Scores::row(0), Scores::column(0, 0));
#pragma unroll
    for (int r = 0; r < Scores::kThreadRows; ++r) {
#pragma unroll
      for (int j = 0; j < Scores::kColumnTiles; ++j) {
        tile::store_shared_pair<Element>(own.at(Scores::row_step(r), 8 * j), dscores.at(r, j, 0), dscores.at(r, j, 1));
      }
    }
  }

  // dq += dS K for the warp's 16 queries.
  __device__ __forceinline__ void multiply_dscores(Gradients& dq, const Tile& keys) const {
    const tile::LeftOperandColumns<DscoreTile> dscores(shared.dscores, warp_row());
    const tile::RightOperandColumns<Tile> k(keys, 0);
#pragma unroll
    for (int first = 0; first < kTile.keys; first += 16) {
      uint32_t a[4];
      dscores.load(a, 0, first);
#pragma unroll
      for (int j = 0; j < Gradients::kColumnTiles; j += 2) {
        uint32_t b[4];
        k.load(b, first, 8 * j);
        tile::multiply_step<Element>(dq.c[0][j], a, b[0], b[1]);
        tile::multiply_step<Element>(dq.c[0][j + 1], a, b[2], b[3]);
      }
    }
  }

  // dBias of a sequence that has a bias of its own: its dS. Neighbouring threads store neighbouring keys.
  __device__ __forceinline__ void store_dbias_of(const WorkItem& item) const {
    const attention::BiasGradient& g = p.dbias;
    const int64_t first = item.sequence.batch * g.batch_stride + item.head * g.head_stride;
    const auto queries = static_cast<int>(item.sequence.num_queries);
    const auto keys = static_cast<int>(item.sequence.num_keys);
#pragma unroll 1
    for (int index = static_cast<int>(threadIdx.x); index < queries * kTile.keys; index += kThreads) {
      const int query = index / kTile.keys;
      const int key = index % kTile.keys;
      if (key >= keys) continue;
      const auto dscore = static_cast<float>(shared.dscores.at(key, query));
      store_dbias<Element>(g, first + query * g.query_stride + key * g.key_stride, dscore);
    }
  }

  // Each thread stores a row of scores next to those of the other threads.
  __device__ __forceinline__ void store_dbias_partial() const {
    auto* partial = reinterpret_cast<float4*>(p.dbias_partials) + blockIdx.x * int64_t{Scores::kColumnTiles * kThreads};
#pragma unroll
    for (int j = 0; j < Scores::kColumnTiles; ++j) {
      const float(&c)[4] = dbias.c[0][j];
      partial[j * kThreads + threadIdx.x] = {c[0], c[1], c[2], c[3]};
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kCtasPerSm)
    backward_bias_stationary_kernel(const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  ptx::wait_for_kernel_before();
  ptx::allow_dependent_launch();
  Kernel kernel = {p, *reinterpret_cast<typename Kernel::Shared*>(shared_memory)};
  kernel.run();
}

// Sums the partial dBias of CTAs. Grid: one CTA for each head of the bias and each pair of a thread's rows of scores.
// Each thread adds four scores of all CTAs of a head in order, and then those of the other heads where the bias is the
// same for all.
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads)
    sum_dbias_partials_kernel(const __grid_constant__ BackwardParams p, int partials) {
  using Scores = typename Kernel::Scores;
  ptx::wait_for_kernel_before();
  const int64_t bias_head = blockIdx.y;
  const int j = static_cast<int>(blockIdx.x);
  const auto heads = static_cast<int>(p.num_heads_q);
  const auto* own = reinterpret_cast<const float4*>(p.dbias_partials) + j * Kernel::kThreads + threadIdx.x;
  constexpr int64_t kPartial = Scores::kColumnTiles * Kernel::kThreads;
  float4 sum = {};
  for (int head = p.dbias.per_head ? bias_head : 0; head < (p.dbias.per_head ? bias_head + 1 : heads); ++head) {
#pragma unroll 8
    for (int cta = 0; cta < partials; ++cta) {
      const float4 value = own[(int64_t{cta} * heads + head) * kPartial];
      sum = {sum.x + value.x, sum.y + value.y, sum.z + value.z, sum.w + value.w};
    }
  }
  const float values[] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t key = tile::warp() * Kernel::kRowsPerWarp + Scores::row(i / 2);
    const int64_t query = Scores::column(j, i % 2);
    if (query >= p.sequences.max_seqlen_q || key >= p.sequences.max_seqlen_k) continue;
    const attention::BiasGradient& g = p.dbias;
    store_dbias<typename Kernel::Element>(g, bias_head * g.head_stride + query * g.query_stride + key * g.key_stride,
                                          values[i]);
  }
}

template <class Element>
cudaError_t backward_bias_stationary(const BackwardParams& p, const BackwardPlan& plan, cudaStream_t stream) {
  return common::with_row<kBiasStationaryConfigs>(plan.row, [&](auto row) {
    constexpr BiasStationaryConfig kConfig = kBiasStationaryConfigs[row()];
    using Kernel = BackwardBiasStationaryKernel<Element, kConfig>;
    static_assert(sizeof(typename Kernel::Shared) <= kSharedBytes);
    const cudaError_t error =
        common::launch_blocks_early<Kernel>(backward_bias_stationary_kernel<Kernel>, plan.persistent_ctas, stream, p);
    if (error != cudaSuccess) return error;
    const auto flagged = [&](Rows rows) {
      return common::rows_in_order_of_heads(p, p.dq_nan_flags, rows, kBiasStationaryTokens, Kernel::kRowsPerWarp);
    };
    const cudaError_t repair =
        common::repair_gradients<Element>(p, flagged(Rows::kQueries), flagged(Rows::kKeys), stream);
    if (repair != cudaSuccess || p.dbias_partials == nullptr) return repair;
    const common::EarlyLaunch sums = {.blocks = Kernel::Scores::kColumnTiles,
                                      .threads = Kernel::kThreads,
                                      .slices = static_cast<int>(p.dbias.per_head ? p.num_heads_q : 1)};
    const auto partials = static_cast<int>(plan.persistent_ctas / p.num_heads_q);
    return common::launch_early(sum_dbias_partials_kernel<Kernel>, sums, stream, p, partials);
  });
}

}  // namespace flash_attn_ext::sm80
