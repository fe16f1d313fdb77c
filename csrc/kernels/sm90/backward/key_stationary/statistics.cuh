// Computes delta, and stores it with the LSE in query tiles. It also clears the semaphores of the backward kernel, and
// dQ of queries that see nothing.
//
// Grid: a CTA per query tile of each head. Where many of a packed batch's query tiles do not exist, there are up to
// eight CTAs for each SM, and each searches for tiles that do. kLanes neighbouring lanes share a row, 16 bytes
// each, and add up in a fixed butterfly order. Bound: memory, as in common/sums/delta.cu.
#pragma once

#include "kernels/common/rows/row_products.cuh"
#include "kernels/score/score_tile.cuh"
#include "kernels/sm90/backward/key_stationary/arguments.h"
#include "ptx/dependent_launch.h"

namespace flash_attn_ext::sm90 {

inline constexpr int kStatisticsThreads = 256;

template <class Element, int kLanes>
struct Statistics {
  using Chunk = common::Chunk<Element>;
  static constexpr int kQueries = LoopOrder::kQueries;
  static constexpr int kRowStep = kStatisticsThreads / kLanes;
  static constexpr int kRows = kQueries / kRowStep;  // of a thread

  const KeyStationaryArguments& args;
  const attention::Sequence sequence;
  const QueryTile at;

  __device__ __forceinline__ void run() const {
    const attention::BackwardParams& p = args.params;
    const int tile = at.tile;
    const int head = at.head;
    const int index = args.workspace.index_of(p, sequence, at);
    for (int i = static_cast<int>(threadIdx.x); i < 1 << args.order.log2_accumulators; i += kStatisticsThreads) {
      args.workspace.dq_semaphores[(index << args.order.log2_accumulators) + i] = 0;
    }
    const int64_t first_row = sequence.query_begin + tile * kQueries;
    const int rows = static_cast<int>(min(sequence.num_queries - tile * kQueries, int64_t{kQueries}));
    const int own = static_cast<int>(threadIdx.x) / kLanes;
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    // All loads are in flight together. After the sums, a lane has one of its group's rows.
    const int row = own + lane * kRowStep;
    const bool exists = lane < kRows && row < rows;
    const float lse = exists ? *p.lse.at<const float>(sequence.batch, head, first_row + row) : -INFINITY;
    float deltas[kRows] = {};
    if (lane * Chunk::kCount < p.head_dim_v) {
      common::add_products<Chunk>(
          deltas,
          {p.out.row<const Element>(sequence.batch, head, first_row + own) + lane * Chunk::kCount,
           p.dout.row<const Element>(sequence.batch, head, first_row + own) + lane * Chunk::kCount, p.out.row_stride,
           p.dout.row_stride},
          rows - own, [](int i) { return i * kRowStep; });
    }
    float delta = 0.0f;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      deltas[i] = tile::sum_over_lanes<kLanes>(deltas[i]);
      if (lane == i) delta = deltas[i];
    }
    if (exists) {
      if (p.dlse.present()) delta -= *p.dlse.at<const float>(sequence.batch, head, first_row + row);
      if (args.has_exact_delta) {
        const float exact = *p.delta.at<float>(sequence.batch, head, first_row + row);
        if (isfinite(exact)) delta = exact;
      }
      *p.delta.at<float>(sequence.batch, head, first_row + row) = delta;
    }
    if (lane < kRows) {
      const float own_lse = relative_to_key_bias(lse, first_row + row, exists);
      const float of_row = alibi(row);
      store(args.workspace.statistics_of(index), row, own_lse + of_row, delta, exists);
      if (args.workspace.later_statistics != nullptr) {
        store(args.workspace.later_statistics_of(index), row, own_lse - of_row, delta, exists);
      }
    }
    if (!has_contributors()) clear_dq(first_row, rows);
  }

 private:
  static_assert(kRows <= kLanes);

  // KeyScores::add_alibi computes ALiBi as if all queries were the tile's first one. The LSE takes the rest: slope *
  // row, or its negative where keys are later than the queries.
  __device__ __forceinline__ float alibi(int row) const {
    const attention::AlibiSlopes& slopes = args.params.score_mod.alibi;
    return slopes.present() ? slopes.at<float>(sequence.batch, at.head) * static_cast<float>(row) : 0.0f;
  }

  // With a key bias, KeyBiasReference is subtracted from the LSE. What rounding left out of that then matters.
  __device__ __forceinline__ float relative_to_key_bias(float lse, int64_t query, bool exists) const {
    const attention::BackwardParams& p = args.params;
    if (!p.score_mod.bias.is_of_keys()) return lse;
    if (args.key_bias_maxima.present()) return relative_to_maximum(lse, query, exists);
    const KeyBiasReference reference =
        KeyBiasReference::of<Element>(p, sequence.batch, at.head, sequence.query_begin, sequence.num_keys);
    const float rest = residual(at.head, query, exists);
    // Where q.k is infinite for some keys, queries may differ. Their gradients are computed again.
    if (reference.is_dominant && exists && rest != residual(at.head, sequence.query_begin, true)) return NAN;
    return reference.subtract_from(lse) + rest;
  }

  // The same with KeyBiasMaxima. NaN where gradients are computed again: also where scores had lost digits in the
  // forward pass, which subtracts nothing from a 16-bit bias as large.
  __device__ __forceinline__ float relative_to_maximum(float lse, int64_t query, bool exists) const {
    if (lse == -INFINITY) return lse;
    const auto in_sequence = static_cast<int>(query - sequence.query_begin);
    const float difference = lse - args.key_bias_maxima.of(args.params, sequence, at.head, in_sequence);
    const attention::BiasGradient& dbias = args.params.dbias;
    const bool is_float32 = !dbias.present() || dbias.element == attention::ElementType::kFloat32;
    const bool is_exact = fabsf(difference) <= attention::KeyBiasMaxima::kMostDistance &&
                          (is_float32 || fabsf(lse) <= attention::kMostScore);
    return is_exact ? difference + residual(at.head, query, exists) : NAN;
  }

  // The statistics of a query that sees no key, or does not exist, make its P vanish without a branch.
  __device__ __forceinline__ void store(float* statistics, int row, float lse, float delta, bool exists) const {
    if (args.adds_statistics) {
      using AugmentedColumns = KeyStationaryWorkspace::AugmentedColumns<Element>;
      auto* const columns = reinterpret_cast<AugmentedColumns*>(statistics);
      columns[0].rows[row] =
          lse == -INFINITY ? AugmentedColumns::hidden_row() : AugmentedColumns::row(lse * args.lse_factor);
      columns[1].rows[row] = AugmentedColumns::row(-delta);
      return;
    }
    const bool is_biased = args.params.score_mod.bias.present() && !args.params.score_mod.bias.is_of_keys();
    const float own_lse = lse == -INFINITY ? INFINITY : lse;
    statistics[row] = is_biased ? own_lse : own_lse * kLog2e - args.shift;
    statistics[kQueries + row] = delta * exp2f(-args.shift);
    if (is_biased) {
      const int64_t own_row = sequence.query_begin + at.tile * kQueries + row;
      statistics[2 * kQueries + row] = residual(at.head, own_row, exists) * kLog2e - args.shift;
    }
  }

  // What rounding left out of a query's LSE.
  __device__ __forceinline__ float residual(int head, int64_t row, bool exists) const {
    const auto& residuals = args.params.lse_residual;
    return exists && residuals.present() ? *residuals.at<const float>(sequence.batch, head, row) : 0.0f;
  }

  // Whether there is a key tile of which the queries see something.
  __device__ __forceinline__ bool has_contributors() const {
    const attention::Visibility& visibility = args.params.visibility;
    const LoopOrder::Tiles contributors =
        args.order.contributor(visibility, sequence, 0, LoopDirection::kAscending).contributors(at.tile);
    if (!args.mask.present()) return !contributors.empty();
    const auto batch = static_cast<int>(sequence.batch);
    bool is_seen = false;
#pragma unroll 1
    for (int i = contributors.begin + static_cast<int>(threadIdx.x); i < contributors.end; i += kStatisticsThreads) {
      const int tile = args.mask.tile(args.mask.first_tile(batch, at.head, i), at.tile);
      is_seen |= (args.mask.tiles[tile] & MaskIterations::kSomeTrue) != 0;
    }
    return __syncthreads_or(is_seen) != 0;
  }

  __device__ __forceinline__ void clear_dq(int64_t first_row, int rows) const {
    const attention::MatrixView& dq = args.params.dq;
    const auto columns = static_cast<int>(args.params.head_dim_qk);
    for (int i = static_cast<int>(threadIdx.x); i < rows * columns; i += kStatisticsThreads) {
      dq.row<Element>(sequence.batch, at.head, first_row + i / columns)[i % columns * dq.column_stride] = Element(0.0f);
    }
  }
};

// Computes the query tile of a block of the grid, if the sequence has it.
template <class Element, int kLanes>
__device__ __forceinline__ void compute_statistics(const KeyStationaryArguments& args, const QueryTile& at) {
  const attention::Sequence sequence = args.sequence(at.batch);
  if (at.tile >= LoopOrder::num_tiles(sequence.num_queries, LoopOrder::kQueries)) return;
  Statistics<Element, kLanes>{args, sequence, at}.run();
}

// Runs while the table of key tiles is written, and waits for that only at its end. So a kernel that waits for this one
// also waits for the table.
template <class Element, int kLanes>
__global__ void __launch_bounds__(kStatisticsThreads)
    statistics_kernel(const __grid_constant__ KeyStationaryArguments args, const __grid_constant__ QueryTileGrid grid) {
  ptx::allow_dependent_launch();
  // For list_key_tiles(), which has waited for the kernels of the maxima and of delta.
  if (args.key_bias_maxima.present()) ptx::wait_for_kernel_before();
  if (threadIdx.x == 0) reinterpret_cast<uint32_t*>(args.workspace.dq_nan_flags)[blockIdx.x] = 0;
  compute_statistics<Element, kLanes>(args, grid.at(blockIdx.x));
  ptx::wait_for_kernel_before();
}

// The same with fewer CTAs than query tiles. Each thread looks up a different one. Neighbouring tiles, which mostly
// exist or do not exist together, belong to different CTAs.
template <class Element, int kLanes>
__global__ void __launch_bounds__(kStatisticsThreads)
    searching_statistics_kernel(const __grid_constant__ KeyStationaryArguments args,
                                const __grid_constant__ QueryTileGrid grid) {
  __shared__ uint32_t found[kStatisticsThreads / 32];  // a bit for each thread whose tile exists
  ptx::allow_dependent_launch();
#pragma unroll 1
  for (uint32_t first = blockIdx.x; first < grid.blocks; first += gridDim.x * kStatisticsThreads) {
    const uint32_t own = first + threadIdx.x * gridDim.x;
    bool exists = false;
    if (own < grid.blocks) {
      reinterpret_cast<uint32_t*>(args.workspace.dq_nan_flags)[own] = 0;
      const QueryTile at = grid.at(own);
      exists = at.tile < LoopOrder::num_tiles(args.sequence(at.batch).num_queries, LoopOrder::kQueries);
    }
    const uint32_t of_warp = __ballot_sync(0xFFFFFFFFu, exists);
    __syncthreads();  // all threads have read what was found before
    if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = of_warp;
    __syncthreads();
#pragma unroll 1
    for (uint32_t warp = 0; warp < kStatisticsThreads / 32; ++warp) {
#pragma unroll 1
      for (uint32_t left = found[warp]; left != 0; left &= left - 1) {
        const uint32_t thread = warp * 32 + static_cast<uint32_t>(__ffs(static_cast<int>(left)) - 1);
        compute_statistics<Element, kLanes>(args, grid.at(first + thread * gridDim.x));
      }
    }
  }
  ptx::wait_for_kernel_before();
}

}  // namespace flash_attn_ext::sm90
