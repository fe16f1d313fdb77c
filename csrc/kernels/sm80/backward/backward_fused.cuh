// dQ, dK and dV of short sequences in one kernel: all keys of a head fit one CTA.
//
// Grid: one CTA per (batch, key head). Each warp owns kTile.keys / kTile.warps keys, as in backward_dkdv.cuh: its rows
// of S^T = K Q^T and dP^T = V dO^T are accumulators, and dV += P^T dO and dK += dS^T Q read P and dS from there. The
// CTA has all keys, so it has the complete dS of a query tile: dS goes to shared memory, and the warps share the tile
// of dQ = scale
// * dS K. So there are five GEMMs for a tile instead of the seven of two kernels, each operand is read once, and
// nothing is added across CTAs: sums have one fixed order.
// Shared memory: K, V, two stages of Q and dO, LSE and delta of the head's queries, and one or two tiles of dS. dQ of a
// tile is computed one iteration later, so that one barrier says both that the next tile has arrived and that dS is
// complete.
// A warp skips the GEMMs of query tiles that see none of its keys.
#pragma once

#include "attention/division.h"
#include "kernels/common/launch/launch_early.cuh"
#include "kernels/common/rows/attention_rows.cuh"
#include "kernels/config/sm80.h"
#include "kernels/config/sm80_backward.h"
#include "kernels/epilogue/store_quads.cuh"
#include "kernels/epilogue/store_rows.cuh"
#include "kernels/schedule/schedule.cuh"
#include "kernels/score/score_gradient.cuh"
#include "kernels/sm80/backward/pending_delta.cuh"
#include "kernels/sm80/launch.cuh"
#include "kernels/sm80/sm80_kernels.h"
#include "ptx/dependent_launch.h"
#include "tile/sm80/copy_rows.h"
#include "tile/sm80/gemm.h"
#include "tile/sm80/gemm_transposed.h"

namespace flash_attn_ext::sm80 {

// The CTA's work tile, with the first query head of the KV group.
__device__ __forceinline__ HeadCoord whole_head(const attention::AttentionParams& p, const Schedule& schedule) {
  const Place at = schedule.place(blockIdx.x);
  return {p.sequences.at(at.batch), at.key_head * schedule.group, at.key_head};
}

// Recomputes the CTA's rows without tensor cores. It derives the work tile again, so that the mainloop holds no
// register for it.
template <class Kernel>
__device__ __forceinline__ void fused_without_tensor_cores(const BackwardParams& p, const Schedule& schedule) {
  using Element = typename Kernel::Element;
  const HeadCoord coord = whole_head(p, schedule);
  const attention::Sequence& sequence = coord.sequence;
  for (int64_t key = tile::warp(); key < sequence.num_keys; key += Kernel::kTile.warps) {
    common::compute_dkdv_row<Element>(p, sequence, coord.key_head, key, {});
  }
  for (uint32_t g = 0; g < schedule.group; ++g) {
    const common::HeadRows head = common::head_rows(p, sequence, coord.head + g);
    for (int64_t query = tile::warp(); query < sequence.num_queries; query += Kernel::kTile.warps) {
      common::compute_dq_row<Element>(p, head, query, {});
    }
  }
}

template <class ElementType, FusedConfig kConfig>
struct BackwardFusedKernel {
  using Element = ElementType;
  static constexpr int kHeadDim = kFusedHeadDim;
  static constexpr FusedConfig kTile = kConfig;
  static constexpr int kThreads = kTile.warps * kWarpSize;
  static constexpr int kRowsPerWarp = kTile.keys / kTile.warps;
  static constexpr int kStages = 2;

  using KeyTile = tile::SharedTile<Element, kTile.keys, kHeadDim>;
  using QueryTile = tile::SharedTile<Element, kTile.queries, kHeadDim>;
  using DscoreTile = tile::SharedTile<Element, kTile.keys, kTile.queries>;
  struct Stage {
    QueryTile q;
    QueryTile dout;
  };
  struct Shared {
    KeyTile k;
    KeyTile v;
    Stage stages[kStages];
    DscoreTile dscores[kTile.dscores];
    HeadStatistics statistics[kFusedQueries];
  };

  using Scores = tile::Accumulator<kRowsPerWarp / 16, kTile.queries / 8>;
  using KeyGradients = tile::Accumulator<kRowsPerWarp / 16, kHeadDim / 8>;
  // A warp's share of a tile of dQ has 16 rows.
  static constexpr int kRowTiles = kTile.queries / 16;
  static constexpr int kColumnsPerWarp = kHeadDim * kRowTiles / kTile.warps;
  using QueryGradients = tile::Accumulator<1, kColumnsPerWarp / 8>;

  const BackwardParams& p;
  const Schedule& schedule;
  Shared& shared;
  HeadCoord coord;
  attention::Band band;  // the keys that the sequence's queries see
  KeyGradients dk;
  KeyGradients dv;
  bool found_nan;

  __device__ __forceinline__ void run() {
    band = p.visibility.keys_of_rows(0, 0, coord.sequence);
    load_keys();
    dk.clear();
    dv.clear();
    found_nan = false;
    auto head = static_cast<uint32_t>(coord.head);  // fits 32 bits; 64 would take more registers
    const uint32_t end_head = head + schedule.group;
    do {
      coord.head = head;
      iterate_queries();
    } while (++head != end_head);
    dk.scale(static_cast<float>(p.score_mod.scale));
    // The tile of V is reused as staging for both: only this warp has read its rows.
    if (p.dv.data != nullptr) store(p.dv, dv, p.head_dim_v);
    if (p.dk.data != nullptr) store(p.dk, dk, p.head_dim_qk);
    // A NaN may be a weight of 0 times a NaN or infinity: such rows are recomputed without tensor cores.
    if (__syncthreads_or(found_nan || dk.has_nan() || dv.has_nan())) {
      fused_without_tensor_cores<BackwardFusedKernel>(p, schedule);
    }
  }

 private:
  __device__ __forceinline__ int num_keys() const { return band.length; }
  __device__ __forceinline__ int num_queries() const { return static_cast<int>(coord.sequence.num_queries); }
  __device__ __forceinline__ static int first_key() { return tile::warp() * kRowsPerWarp; }  // of the warp

  // Issues the copies of K and V; they are committed with those of the first query tile.
  __device__ __forceinline__ void load_keys() {
    const int64_t row = coord.sequence.key_begin;
    const auto* k = p.k.row<const Element>(coord.sequence.batch, coord.key_head, row);
    const auto* v = p.v.row<const Element>(coord.sequence.batch, coord.key_head, row);
    tile::copy_rows_async<kThreads>(shared.k, {k, p.k.row_stride, static_cast<int>(p.head_dim_qk)}, num_keys());
    tile::copy_rows_async<kThreads>(shared.v, {v, p.v.row_stride, static_cast<int>(p.head_dim_v)}, num_keys());
  }

  __device__ __forceinline__ void load_queries(int tile) {
    Stage& stage = shared.stages[tile % kStages];
    const int first_query = tile * kTile.queries;
    const int64_t row = coord.sequence.query_begin + first_query;
    const int count = num_queries() - first_query;
    const auto* q = p.q.row<const Element>(coord.sequence.batch, coord.head, row);
    const auto* dout = p.dout.row<const Element>(coord.sequence.batch, coord.head, row);
    tile::copy_rows_async<kThreads>(stage.q, {q, p.q.row_stride, static_cast<int>(p.head_dim_qk)}, count);
    tile::copy_rows_async<kThreads>(stage.dout, {dout, p.dout.row_stride, static_cast<int>(p.head_dim_v)}, count);
  }

  // The mainloop over all query tiles of a head, in ascending order.
  __device__ __forceinline__ void iterate_queries() {
    const int tiles = attention::ceil_div(num_queries(), kTile.queries);
#pragma unroll
    for (int tile = 0; tile < kStages; ++tile) {
      if (tile < tiles) load_queries(tile);
    }
    ptx::commit_copies();
    load_head_statistics<BackwardFusedKernel>(shared.statistics, p, coord, tiles * kTile.queries);
    for (int tile = 0;; ++tile) {
      ptx::wait_copies<0>();
      __syncthreads();  // the tile has arrived, dS of the preceding one is complete, and no warp reads earlier tiles
                        // any more
      if (tile > 0) {
        if (tile + 1 < tiles) load_queries(tile + 1);
        ptx::commit_copies();
        compute_dq(tile - 1);
      }
      if (tile == tiles) break;
      add_queries(tile);
    }
  }

  // The keys that queries of the tile see.
  struct Keys {
    int begin;
    int end;
  };
  __device__ __forceinline__ Keys keys_of(int tile) const {
    const int first_query = tile * kTile.queries;
    const int last_query = min(first_query + kTile.queries, num_queries()) - 1;
    return {max(band.first_column(first_query), 0), band.end_column(last_query)};
  }

  // Waits until no warp reads dS of the preceding tile any more. Warps reach this barrier from different branches.
  __device__ __forceinline__ static void release_dscores() {
    if constexpr (kTile.dscores == 1) __syncthreads();
  }

  // Adds a query tile to dK and dV, and computes its dS.
  __device__ __forceinline__ void add_queries(int tile) {
    const Keys keys = keys_of(tile);
    const bool seen = keys.begin < first_key() + kRowsPerWarp && keys.end > first_key();
    if (!seen) {
      release_dscores();
      return;
    }
    const Stage& stage = shared.stages[tile % kStages];
    Scores scores;
    Scores gradients;
    compute_scores(scores, gradients, tile);
    release_dscores();
    const tile::LaneAddress<DscoreTile> own(shared.dscores[tile % kTile.dscores], first_key() + Scores::row(0),
                                            Scores::column(0, 0));
#pragma unroll
    for (int r = 0; r < Scores::kThreadRows; ++r) {
#pragma unroll
      for (int j = 0; j < Scores::kColumnTiles; ++j) {
        tile::store_shared_pair<Element>(own.at(Scores::row_step(r), 8 * j), gradients.at(r, j, 0),
                                         gradients.at(r, j, 1));
      }
    }
    tile::multiply_registers(dv, scores, stage.dout);
    tile::multiply_registers(dk, gradients, stage.q);
  }

  // Computes P and dS of the warp's keys and a query tile.
  __device__ __forceinline__ void compute_scores(Scores& scores, Scores& gradients, int tile) {
    const Stage& stage = shared.stages[tile % kStages];
    const int first_query = tile * kTile.queries;
    const int end_query = first_query + kTile.queries;
    scores.clear();
    gradients.clear();
    tile::multiply_head_dims(scores, shared.k, first_key(), stage.q);
    tile::multiply_head_dims(gradients, shared.v, first_key(), stage.dout);
    const ScoreTile<Rows::kKeys, Scores> where = {p, coord, first_key(), first_query};
    const auto statistics = [&](int, int column) -> QueryStatistics { return shared.statistics[first_query + column]; };
    const bool full = band.first_column(end_query - 1) <= first_key() &&
                      band.end_column(first_query) >= first_key() + kRowsPerWarp && end_query <= num_queries();
    if (full) {
      differentiate_scaled<false>(scores, gradients, where, statistics);
    } else {
      // Scores of keys past the end become -inf, since their dS is an operand of dQ.
      const int rows = num_keys() - first_key();
      for_each_element<Scores>([&](int r, int row, int j, int e, int) {
        if (row >= rows) scores.at(r, j, e) = -INFINITY;
      });
      differentiate_scaled<true>(scores, gradients, where, statistics);
    }
  }

  // Computes dQ of a tile whose dS is complete: each warp has 16 rows and an equal share of the columns.
  __device__ __forceinline__ void compute_dq(int tile) {
    const int first_row = tile::warp() % kRowTiles * 16;
    const int first_column = tile::warp() / kRowTiles * kColumnsPerWarp;
    const tile::LeftOperandColumns<DscoreTile> dscores(shared.dscores[tile % kTile.dscores], first_row);
    const tile::RightOperandColumns<KeyTile> k(shared.k, first_column);
    const Keys keys = keys_of(tile);
    // Four accumulation chains are in flight: those of two column tiles, each in two sums over every second 16 keys.
    constexpr int kSteps = kRowsPerWarp / 16;
    constexpr int kSums = QueryGradients::kColumnTiles < 4 ? kSteps : 1;
    QueryGradients sums[kSums];
    for (QueryGradients& sum : sums) sum.clear();
#pragma unroll(kTile.keys / 64)
    for (int first = keys.begin / kRowsPerWarp * kRowsPerWarp; first < keys.end; first += kRowsPerWarp) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        uint32_t a[4];
        dscores.load(a, 0, first + 16 * i);
#pragma unroll
        for (int j = 0; j < QueryGradients::kColumnTiles; j += 2) {
          uint32_t b[4];
          k.load(b, first + 16 * i, 8 * j);
          tile::multiply_step<Element>(sums[i % kSums].c[0][j], a, b[0], b[1]);
          tile::multiply_step<Element>(sums[i % kSums].c[0][j + 1], a, b[2], b[3]);
        }
      }
    }
    QueryGradients& dq = sums[0];
    if constexpr (kSums == 2) dq.add(sums[1]);
    found_nan |= dq.has_nan();
    dq.scale(static_cast<float>(p.score_mod.scale));
    const int64_t query = tile * kTile.queries + first_row;
    Element* target = p.dq.row<Element>(coord.sequence.batch, coord.head, coord.sequence.query_begin + query);
    store_quads<Element>({.data = target + first_column * p.dq.column_stride,
                          .row_stride = p.dq.row_stride,
                          .column_stride = p.dq.column_stride,
                          .rows = num_queries() - static_cast<int>(query),
                          .columns = static_cast<int>(p.head_dim_qk) - first_column},
                         dq);
  }

  __device__ __forceinline__ void store(const attention::MatrixView& view, const KeyGradients& gradients,
                                        int64_t head_dim) {
    const int64_t row = coord.sequence.key_begin + first_key();
    store_rows<Element>({.data = view.row<Element>(coord.sequence.batch, coord.key_head, row),
                         .row_stride = view.row_stride,
                         .column_stride = view.column_stride,
                         .rows = num_keys() - first_key(),
                         .columns = static_cast<int>(head_dim)},
                        gradients, shared.v, first_key());
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kTile.ctas_per_sm)
    backward_fused_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ Schedule schedule) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  ptx::wait_for_kernel_before();
  Kernel kernel = {p, schedule, *reinterpret_cast<typename Kernel::Shared*>(shared_memory), whole_head(p, schedule)};
  kernel.run();
}

template <class Element>
cudaError_t backward_fused(const BackwardParams& p, const BackwardPlan& plan, cudaStream_t stream) {
  return common::with_row<kFusedConfigs>(plan.fused_row, [&](auto row) {
    using Kernel = BackwardFusedKernel<Element, kFusedConfigs[row()]>;
    const Schedule schedule = make_schedule(p, {.pairs = {p.first_pair, p.num_pairs},
                                                .rows = Rows::kKeys,
                                                .tile_rows = Kernel::kTile.keys,
                                                .slices = 1,
                                                .element_bytes = sizeof(Element),
                                                .l2_bytes = plan.l2_bytes});
    static_assert(sizeof(typename Kernel::Shared) <= kSharedBytes);
    return common::launch_blocks_early<Kernel>(backward_fused_kernel<Kernel>, {schedule.num_blocks, schedule.splits},
                                               stream, p, schedule);
  });
}

}  // namespace flash_attn_ext::sm80
