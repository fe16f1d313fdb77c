// dQ, dK, dV and dBias of many short sequences, such as the windows of Swin.
//
// Grid: persistent CTAs. Each has one head and a share of the batch entries (BatchEntries), and one tile holds all
// queries and keys of a sequence, as in forward_bias_stationary.cuh. Each warp owns 16 keys: its rows of S^T = K Q^T
// and dP^T = V dO^T are accumulators, and dV += P^T dO and dK += dS^T Q read P and dS from there. dS also goes to
// shared memory, from which each warp computes 16 rows of dQ = scale * dS K.
//
// dBias is the sum of dS over batch entries. Each thread keeps the sums of its scores in registers, and writes them
// once, at the end. sum_dbias_partials_kernel adds those of the CTAs of a head in a fixed order.
//
// Where each batch entry has a bias of its own, the dBias of an entry is its dS.
//
// Shared memory: the bias, two stages of Q, K, V, O, dO and mask bits, the statistics of the queries, and dS. Above
// head dim 64 there is one stage, without O. There are three barriers for each sequence: its loads have arrived, its
// statistics are complete, and its dS is complete. With one stage, or a bias of each sequence, a fourth one is before
// the next loads.
#pragma once

#include <type_traits>

#include "attention/division.h"
#include "kernels/common/launch/launch_early.cuh"
#include "kernels/common/rows/attention_rows.cuh"
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

// Recomputes the warp's flagged rows of all gradients without tensor cores: a NaN may be a weight of 0 times a NaN or
// infinity of a row that takes no part. This is a call, and comes at the end, so that the loop over batch entries holds
// no register for it.
template <class Kernel>
__device__ __noinline__ void repair_flagged(const BackwardParams& p, BatchEntries entries) {
  using Element = typename Kernel::Element;
  for_each_flagged_row<Kernel>(p, p.dq_nan_flags, entries, [&](const HeadCoord& coord, int row) {
    if (row < coord.sequence.num_keys) common::compute_dkdv_row<Element>(p, coord.sequence, coord.key_head, row, {});
    if (row >= coord.sequence.num_queries) return;
    const common::HeadRows head = common::head_rows(p, coord.sequence, coord.head);
    common::compute_dq_row<Element>(p, head, row, {});
  });
}

// O of a sequence in shared memory, or nothing. It is a base class, since an empty base takes no memory on the host and
// on the device; an empty member with [[no_unique_address]] has other places on the two.
template <class Tile, bool kStaged>
struct StagedOut {
  Tile out;
};
template <class Tile>
struct StagedOut<Tile, false> {};

// kOwnBias: each batch entry has a bias of its own, which CopiedBias copies.
template <class ElementType, BiasStationaryConfig kConfig, bool kOwnBias>
struct BackwardBiasStationaryKernel {
  using Element = ElementType;
  static constexpr TileShape kTile = kConfig.tile;
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kCtasPerSm = kConfig.ctas_per_sm_backward;
  static constexpr bool kLoadsAhead = kTile.stages > 1;  // the next sequence, while it computes this one
  static_assert(kLoadsAhead || !kOwnBias);
  static constexpr int kThreads = kTile.warps * kWarpSize;
  static constexpr int kRowsPerWarp = kTile.keys / kTile.warps;

  using Tile = tile::SharedTile<Element, kBiasStationaryTokens, kHeadDim>;
  using DscoreTile = tile::SharedTile<Element, kTile.keys, kTile.queries>;
  using Scores = tile::Accumulator<kRowsPerWarp / 16, kTile.queries / 8>;
  // The columns of a gradient that registers hold at a time.
  static constexpr int kColumnsAtOnce = kHeadDim <= 64 ? kHeadDim : kHeadDim % 64 == 0 ? 64 : 32;
  using Gradients = tile::Accumulator<kRowsPerWarp / 16, kColumnsAtOnce / 8>;  // of keys, or of queries
  using Bias = StationaryBias<Element, Scores, kThreads>;
  using OwnBias = CopiedBias<Element, kThreads>;  // of a sequence
  using Where = ScoreTile<Rows::kKeys, Scores>;
  using Chunk = common::Chunk<Element>;

  // Where one sequence fills shared memory, each thread reads its part of O to registers.
  static constexpr bool kStagesOut = kLoadsAhead;
  static constexpr int kThreadsPerQuery = kThreads / kBiasStationaryTokens;
  static constexpr int kOwnChunks = kHeadDim / kThreadsPerQuery / Chunk::kCount;
  struct NoOut {};
  struct OutChunks {
    Chunk chunks[kOwnChunks];
  };

  struct Stage : StagedOut<Tile, kStagesOut> {
    Tile q;
    Tile k;
    Tile v;
    Tile dout;
    StagedMaskBits mask;
  };
  struct Shared {
    Stage stages[kTile.stages];
    union {
      Bias bias;
      OwnBias own_bias;
    };
    DscoreTile dscores;
    QueryStatistics statistics[kBiasStationaryTokens];
  };

  // What the two threads that share a query read of it, ahead of its delta.
  struct Statistics {
    float lse;
    float residual;
    std::conditional_t<kStagesOut, NoOut, OutChunks> out;
  };

  const BackwardParams& p;
  Shared& shared;
  Scores dbias;

  __device__ __forceinline__ void run() {
    dbias.clear();
    const BatchEntries entries = batch_entries(p);
    const bool any_flagged = iterate(entries);
    if constexpr (!kOwnBias) {
      if (p.dbias_partials != nullptr) store_dbias_partial();
    }
    if (any_flagged) repair_flagged<BackwardBiasStationaryKernel>(p, entries);
  }

 private:
  __device__ __forceinline__ static int warp_row() { return tile::warp() * kRowsPerWarp; }
  __device__ __forceinline__ static int own_query() { return static_cast<int>(threadIdx.x) / kThreadsPerQuery; }
  __device__ __forceinline__ static int own_part() { return static_cast<int>(threadIdx.x) % kThreadsPerQuery; }
  __device__ __forceinline__ static int own_column(int chunk) {
    return (own_part() * kOwnChunks + chunk) * Chunk::kCount;
  }

  // Returns whether some of the warp's rows are flagged.
  __device__ __forceinline__ bool iterate(const BatchEntries& entries) {
    const auto end = static_cast<int>(p.batch);
    int current = 0;  // the stage of the sequence
    bool any_flagged = false;
    Statistics next;
    const auto load_to = [&](int stage, int entry) {
      load(shared.stages[stage], coord_at(p, entries.head, entry));
      next = load_statistics(coord_at(p, entries.head, entry));
    };
    load_to(0, entries.first);
    const bool stays = !kOwnBias && p.score_mod.bias.batch_stride == 0;  // the bias of the head
    if (stays) load_bias(coord_at(p, entries.head, entries.first));
    const uint32_t hidden = kOwnBias ? OwnBias::hidden_by_position(where(coord_at(p, entries.head, entries.first))) : 0;
#pragma unroll 1
    for (int entry = entries.first;; entry += entries.step) {
      const Statistics statistics = next;
      ptx::wait_copies<0>();
      __syncthreads();  // the sequence has arrived, and no warp reads the other stage, statistics or dS any more
      const bool more = entry + entries.step < end;
      const auto load_next = [&] {
        if (kLoadsAhead && more) load_to(1 - current, entry + entries.step);
      };
      if constexpr (kOwnBias) {
        const HeadCoord coord = coord_at(p, entries.head, entry);
        const auto own_bias = shared.own_bias.read(where(coord), hidden);
        __syncthreads();  // no warp reads the bias any more
        load_next();
        any_flagged |= compute(shared.stages[current], statistics, coord, own_bias);
      } else {
        load_next();
        if (!stays) load_bias(coord_at(p, entries.head, entry));
        any_flagged |= compute(shared.stages[current], statistics, coord_at(p, entries.head, entry), shared.bias);
      }
      if (!more) break;
      if constexpr (kLoadsAhead) {
        current = 1 - current;
      } else {
        __syncthreads();  // no warp reads the sequence any more
        load_to(0, entry + entries.step);
      }
    }
    return any_flagged;
  }

  __device__ __forceinline__ Where where(const HeadCoord& coord) const { return {p, coord, warp_row(), 0}; }
  __device__ __forceinline__ void load_bias(const HeadCoord& coord) { shared.bias.load(where(coord)); }

  __device__ __forceinline__ void copy(Tile& tile, const attention::MatrixView& view, const HeadCoord& coord,
                                       int64_t head_dim, int64_t rows) const {
    const auto* first = view.row<const Element>(coord.sequence.batch, coord.head, 0);
    tile::copy_sequence_async<kThreads>(tile, {first, view.row_stride, static_cast<int>(head_dim)},
                                        static_cast<int>(rows));
  }

  __device__ __forceinline__ void load(Stage& stage, const HeadCoord& coord) const {
    copy(stage.q, p.q, coord, p.head_dim_qk, coord.sequence.num_queries);
    copy(stage.k, p.k, coord, p.head_dim_qk, coord.sequence.num_keys);
    copy(stage.v, p.v, coord, p.head_dim_v, coord.sequence.num_keys);
    copy(stage.dout, p.dout, coord, p.head_dim_v, coord.sequence.num_queries);
    if constexpr (kStagesOut) copy(stage.out, p.out, coord, p.head_dim_v, coord.sequence.num_queries);
    stage.mask.load(p, coord);
    if constexpr (kOwnBias) shared.own_bias.copy(p.score_mod.bias, coord);
    ptx::commit_copies();
  }

  __device__ __forceinline__ Statistics load_statistics(const HeadCoord& coord) const {
    Statistics own = {.lse = -INFINITY};
    if (own_query() >= coord.sequence.num_queries) return own;
    own.lse = statistic(p.lse, coord);
    if (p.lse_residual.present()) own.residual = statistic(p.lse_residual, coord);
    if constexpr (!kStagesOut) read_out(own.out, coord);
    return own;
  }
  __device__ __forceinline__ void read_out(OutChunks& out, const HeadCoord& coord) const {
    const auto* row = p.out.row<const Element>(coord.sequence.batch, coord.head, own_query());
#pragma unroll
    for (int i = 0; i < kOwnChunks; ++i) {
      const int column = own_column(i);
      out.chunks[i] = column < p.head_dim_v ? *reinterpret_cast<const Chunk*>(row + column) : Chunk{};
    }
  }
  __device__ __forceinline__ static float statistic(const attention::StatisticView& view, const HeadCoord& coord) {
    return *view.at<const float>(coord.sequence.batch, coord.head, own_query());
  }

  // Returns whether the warp's rows are flagged.
  template <class Pairs>
  __device__ __forceinline__ bool compute(Stage& stage, const Statistics& statistics, const HeadCoord& coord,
                                          const Pairs& bias) {
    share_statistics(stage, statistics, coord);
    __syncthreads();  // the statistics are complete
    Scores scores;
    Scores gradients;
    scores.clear();
    gradients.clear();
    tile::multiply_head_dims(scores, stage.k, warp_row(), stage.q);
    tile::multiply_head_dims(gradients, stage.v, warp_row(), stage.dout);
    differentiate(scores, gradients, bias, stage.mask);
    if constexpr (!kOwnBias) dbias.add(gradients);
    store_dscores(gradients);
    const int64_t keys = coord.sequence.num_keys;
    bool found_nan = false;
    const auto store = [&](OutputRows<Element> target, float scale, auto&& multiply) {
      if (target.data == nullptr) return;
#pragma unroll 1
      for (int column = 0; column < kHeadDim; column += kColumnsAtOnce) {
        Gradients gradient;
        gradient.clear();
        multiply(gradient, column);
        gradient.scale(scale);
        found_nan |= store_row_chunks(target, gradient);
        target.data += kColumnsAtOnce;
        target.columns -= kColumnsAtOnce;
      }
    };
    const auto scale = static_cast<float>(p.score_mod.scale);
    store(rows_of(p.dk, coord, keys, p.head_dim_qk), scale,
          [&](Gradients& dk, int column) { tile::multiply_registers(dk, gradients, stage.q, column); });
    store(rows_of(p.dv, coord, keys, p.head_dim_v), 1.0f,
          [&](Gradients& dv, int column) { tile::multiply_registers(dv, scores, stage.dout, column); });
    __syncthreads();  // dS is complete
    if (p.dbias.per_batch) store_dbias_of(coord);
    store(rows_of(p.dq, coord, coord.sequence.num_queries, p.head_dim_qk), scale,
          [&](Gradients& dq, int column) { multiply_dscores(dq, stage.k, column); });
    return flag_nan_in_order_of_heads<kTile.warps>(p.dq_nan_flags, p, coord, found_nan);
  }

  // The warp's rows of a gradient. Without data where it is not wanted.
  __device__ __forceinline__ OutputRows<Element> rows_of(const attention::MatrixView& view, const HeadCoord& coord,
                                                         int64_t rows, int64_t columns) const {
    if (view.data == nullptr) return {};
    return {.data = view.row<Element>(coord.sequence.batch, coord.head, warp_row()),
            .row_stride = view.row_stride,
            .column_stride = view.column_stride,
            .rows = static_cast<int>(rows) - warp_row(),
            .columns = static_cast<int>(columns)};
  }

  // Computes delta = rowsum(dO ∘ O) − dLSE, and writes it, too, for rows that are repaired and for the gradient of
  // sinks.
  __device__ __forceinline__ void share_statistics(const Stage& stage, const Statistics& own, const HeadCoord& coord) {
    float delta = 0.0f;
#pragma unroll
    for (int i = 0; i < kOwnChunks; ++i) {
      const Chunk dout = chunk_of(stage.dout, own_column(i));
      if constexpr (kStagesOut) {
        delta = common::add_product(delta, chunk_of(stage.out, own_column(i)), dout);
      } else {
        delta = common::add_product(delta, own.out.chunks[i], dout);
      }
    }
    delta = tile::sum_over_lanes<kThreadsPerQuery>(delta);
    if (own_part() != 0) return;
    if (own_query() < coord.sequence.num_queries) {
      if (p.dlse.present()) delta -= statistic(p.dlse, coord);
      *p.delta.at<float>(coord.sequence.batch, coord.head, own_query()) = delta;
    }
    shared.statistics[own_query()] = query_statistics<true>(own.lse, delta, own.residual);
  }
  __device__ __forceinline__ static Chunk chunk_of(const Tile& tile, int column) {
    return *reinterpret_cast<const Chunk*>(&tile.at(own_query(), column));
  }

  // Turns q.k into P, and dP into dS.
  template <class Pairs>
  __device__ __forceinline__ void differentiate(Scores& scores, Scores& gradients, const Pairs& bias,
                                                const StagedMaskBits& mask) const {
    const auto scale = static_cast<float>(p.score_mod.scale);
    const bool masked = p.score_mod.mask_bits.present();
    // The word and the bit of the thread's keys, which are 8 apart, in a group of keys.
    const int key = warp_row() + Scores::row(0);
    const int word = key % 8 / 2;
    const uint32_t low_bit = 1u << (key / 8 * 2 + key % 2);
    bias.for_each_pair([&](int r, int j, float low, float high) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float of_score = e == 0 ? low : high;
        const int query = Scores::column(j, e);
        const QueryStatistics of_query = shared.statistics[query];
        // Subtracts first, since scores may be as low as the smallest finite number.
        const float above = fmaf(scores.at(r, j, e), scale, of_score) - of_query.lse;
        const float probability = ptx::exp2(above * kLog2e - of_query.residual);
        const float gradient = probability * (gradients.at(r, j, e) - of_query.delta);
        bool hidden = of_score == -INFINITY;
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

  // dq += dS K for the warp's 16 queries, and columns from first_column on.
  __device__ __forceinline__ void multiply_dscores(Gradients& dq, const Tile& keys, int first_column) const {
    const tile::LeftOperandColumns<DscoreTile> dscores(shared.dscores, warp_row());
    const tile::RightOperandColumns<Tile> k(keys, first_column);
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

  // dBias of a sequence that has a bias of its own: its dS. Other kernels than those of kOwnBias hold sums of dBias in
  // registers, and have none left for pairs of keys.
  __device__ __forceinline__ void store_dbias_of(const HeadCoord& coord) const {
    const attention::BiasGradient& g = p.dbias;
    const int64_t first = coord.sequence.batch * g.batch_stride + coord.head * g.head_stride;
    const auto queries = static_cast<int>(coord.sequence.num_queries);
    const auto keys = static_cast<int>(coord.sequence.num_keys);
    if constexpr (kOwnBias) {
      store_dbias_pairs(first, queries, keys);
    } else {
      store_dbias_elements(first, queries, keys);
    }
  }
  // Each warp stores 16 queries.
  __device__ __forceinline__ void store_dbias_pairs(int64_t first, int queries, int keys) const {
    const attention::BiasGradient& g = p.dbias;
    const tile::LeftOperandColumns<DscoreTile> dscores(shared.dscores, warp_row());
    const int first_query = warp_row() + tile::lane() / 4;
    const int first_key = tile::lane() % 4 * 2;
#pragma unroll
    for (int step = 0; step < kTile.keys; step += 16) {
      uint32_t pairs[4];
      dscores.load(pairs, 0, step);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int query = first_query + i % 2 * 8;
        const int key = step + i / 2 * 8 + first_key;
        if (query >= queries) continue;
        store_dbias_pair<Element>(g, first + query * g.query_stride + key * g.key_stride, pairs[i], keys - key);
      }
    }
  }
  // Neighbouring threads store neighbouring keys.
  __device__ __forceinline__ void store_dbias_elements(int64_t first, int queries, int keys) const {
    const attention::BiasGradient& g = p.dbias;
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

template <class Kernel>
cudaError_t launch_backward_bias_stationary(const BackwardParams& p, const BackwardPlan& plan, cudaStream_t stream) {
  static_assert(sizeof(typename Kernel::Shared) <= kSharedBytes);
  const cudaError_t error =
      common::launch_blocks_early<Kernel>(backward_bias_stationary_kernel<Kernel>, plan.persistent_ctas, stream, p);
  if (error != cudaSuccess || p.dbias_partials == nullptr) return error;
  const common::EarlyLaunch sums = {.blocks = Kernel::Scores::kColumnTiles,
                                    .threads = Kernel::kThreads,
                                    .slices = static_cast<int>(p.dbias.per_head ? p.num_heads_q : 1)};
  const auto partials = static_cast<int>(plan.persistent_ctas / p.num_heads_q);
  return common::launch_early(sum_dbias_partials_kernel<Kernel>, sums, stream, p, partials);
}

template <class Element>
cudaError_t backward_bias_stationary(const BackwardParams& p, const BackwardPlan& plan, cudaStream_t stream) {
  return common::with_row<kBiasStationaryConfigs>(plan.row, [&](auto row) {
    constexpr BiasStationaryConfig kConfig = kBiasStationaryConfigs[row()];
    using Kernel = BackwardBiasStationaryKernel<Element, kConfig, false>;
    if constexpr (Kernel::kLoadsAhead) {
      using OwnBiasKernel = BackwardBiasStationaryKernel<Element, kConfig, true>;
      const bool sums = p.dbias.present() && !p.dbias.per_batch;
      if (!sums && OwnBiasKernel::OwnBias::fits(p))
        return launch_backward_bias_stationary<OwnBiasKernel>(p, plan, stream);
    }
    return launch_backward_bias_stationary<Kernel>(p, plan, stream);
  });
}

}  // namespace flash_attn_ext::sm80
