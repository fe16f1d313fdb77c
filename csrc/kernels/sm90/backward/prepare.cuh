// What the backward kernel needs before it starts: delta, with the LSE, in tiles; the table of tiles of keys; zeros
// where blocks meet, and in dQ where queries see nothing.
//
// Grid: a block per tile of queries of each head. Bound: memory, as in common/delta.cu.
#pragma once

#include "attention/divisor.h"
#include "kernels/common/rows/row_products.cuh"
#include "kernels/schedule/schedule.cuh"
#include "kernels/score/score_tile.cuh"
#include "kernels/sm90/backward/arguments.h"
#include "ptx/dependent_launch.h"

namespace flash_attn_ext::sm90 {

struct PrepareGrid {
  attention::Divisor tiles;  // of the longest sequence's queries
  attention::Divisor heads;
  uint32_t blocks;
};

inline constexpr int kPrepareThreads = 256;

template <class Element>
struct Prepare {
  static constexpr int kQueries = VisitOrder::kQueries;

  const BackwardArguments& args;

  __device__ __forceinline__ void run(const PrepareGrid& grid) const {
    clear_and_list(grid);
    const attention::BackwardParams& p = args.params;
    const uint32_t index = grid.tiles.quotient(blockIdx.x);
    const auto tile = static_cast<int>(blockIdx.x - index * grid.tiles.divisor);
    const auto batch = static_cast<int>(grid.heads.quotient(index));
    const auto head = static_cast<int>(index - batch * grid.heads.divisor);
    const attention::Sequence sequence = p.sequences.at(batch);
    if (tile >= VisitOrder::num_tiles(sequence.num_queries, kQueries)) return;
    const int64_t accumulator =
        int64_t{head} * args.workspace.tiles_of_head + BackwardWorkspace::first_tile(p, sequence) + tile;
    if (threadIdx.x == 0) args.workspace.turns[accumulator] = 0;
    const int rows = static_cast<int>(min(sequence.num_queries - tile * kQueries, int64_t{kQueries}));
    if (p.head_dim_v <= 64) {
      write_statistics<8>(sequence, head, tile, accumulator, rows);
    } else {
      write_statistics<16>(sequence, head, tile, accumulator, rows);
    }
    if (VisitOrder::visitors(p.visibility, sequence, tile).empty()) clear_dq(sequence, head, tile, rows);
  }

 private:
  // Counters and flags, and the table's entries, by all threads of the grid.
  __device__ __forceinline__ void clear_and_list(const PrepareGrid& grid) const {
    const BackwardWorkspace& workspace = args.workspace;
    const attention::BackwardParams& p = args.params;
    const int64_t step = int64_t{grid.blocks} * kPrepareThreads;
    const int64_t first = int64_t{blockIdx.x} * kPrepareThreads + threadIdx.x;
    if (first == 0) *workspace.claims = 0;
    const int64_t query_flags = int64_t{grid.blocks} * 4;
    for (int64_t i = first; i < query_flags; i += step) workspace.dq_nan_flags[i] = 0;
    const int64_t key_flags = p.batch * p.num_heads_k * args.order.tiles * 4 * VisitOrder::kParts;
    for (int64_t i = first; i < key_flags; i += step) workspace.dkdv_nan_flags[i] = 0;
    const uint32_t claims = args.order.num_claims();
    for (int64_t i = first; i < claims; i += step) workspace.table[i] = work_of(static_cast<uint32_t>(i));
  }

  __device__ __forceinline__ KeyTileWork work_of(uint32_t index) const {
    const attention::BackwardParams& p = args.params;
    const VisitOrder::Claim claim = args.order.claim(index);
    const auto heads = static_cast<uint32_t>(p.num_heads_k);
    const uint32_t batch = claim.pair / heads;
    const attention::Sequence sequence = p.sequences.at(batch);
    KeyTileWork work = {};
    work.batch = static_cast<int>(batch);
    work.key_head = static_cast<int>(claim.pair - batch * heads);
    work.tile = claim.tile;
    work.walk = claim.walk;
    work.group_end = static_cast<int>(claim.group_end);
    work.query_begin = static_cast<int>(sequence.query_begin);
    work.key_begin = static_cast<int>(sequence.key_begin);
    work.num_queries = static_cast<int>(sequence.num_queries);
    work.num_keys = static_cast<int>(sequence.num_keys);
    work.first_accumulator = BackwardWorkspace::first_tile(p, sequence);
    if (claim.tile >= VisitOrder::num_tiles(sequence.num_keys, VisitOrder::kKeys) || sequence.num_queries == 0) {
      return work;
    }
    const VisitOrder::Tiles visited = VisitOrder::visited(p.visibility, sequence, claim.tile);
    work.begin = visited.begin;
    work.end = visited.end;
    work.first = args.order.first_of_cycle(sequence, claim.tile);
    work.visits = visited.empty() ? 0 : (visited.end - visited.begin) * static_cast<int>(p.queries_per_key_head());
    for (int w = 0; w < VisitOrder::kParts; ++w)
      work.own[w] = seen_by(sequence, claim.tile * VisitOrder::kKeys + w * 64);
    return work;
  }

  // The tiles of queries that see 64 keys, of which some may not be there.
  __device__ __forceinline__ TileRange seen_by(const attention::Sequence& sequence, int first) const {
    const attention::Visibility& visibility = args.params.visibility;
    const int end = static_cast<int>(min(int64_t{first} + 64, sequence.num_keys));
    if (first >= end) return {0, 0, 0, 0};
    TileRange range =
        tile_range<kQueries>(visibility.queries_of(first, sequence), visibility.queries_of(end - 1, sequence));
    if (end < first + 64) range.full_begin = range.full_end = 0;
    return range;
  }

  template <int kLanes>
  __device__ __forceinline__ void write_statistics(const attention::Sequence& sequence, int head, int tile,
                                                   int64_t accumulator, int rows) const {
    constexpr int kRowStep = kPrepareThreads / kLanes;
    constexpr int kRows = kQueries / kRowStep;
    const attention::BackwardParams& p = args.params;
    const int64_t first_row = sequence.query_begin + tile * kQueries;
    const int own = static_cast<int>(threadIdx.x) / kLanes;
    float delta[kRows] = {};
    common::sum_output_products<Element, kLanes>(delta, {p.out, p.dout, sequence.batch, head, p.head_dim_v},
                                                 first_row + own, rows - own, kRowStep);
    if (threadIdx.x % kLanes != 0) return;
    float* const statistics = args.workspace.statistics_of(accumulator);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = own + i * kRowStep;
      const bool exists = row < rows;
      float lse = -INFINITY;
      if (exists) {
        const int64_t query = first_row + row;
        lse = *p.lse.at<const float>(sequence.batch, head, query);
        if (p.dlse.present()) delta[i] -= *p.dlse.at<const float>(sequence.batch, head, query);
        *p.delta.at<float>(sequence.batch, head, query) = delta[i];
      }
      // Of a query that sees no key, probabilities vanish without a branch.
      statistics[row] = lse == -INFINITY ? INFINITY : lse * kLog2e;
      statistics[kQueries + row] = exists ? delta[i] : 0.0f;
    }
  }

  __device__ __forceinline__ void clear_dq(const attention::Sequence& sequence, int head, int tile, int rows) const {
    const attention::MatrixView& dq = args.params.dq;
    const auto columns = static_cast<int>(args.params.head_dim_qk);
    for (int i = static_cast<int>(threadIdx.x); i < rows * columns; i += kPrepareThreads) {
      Element* const row = dq.row<Element>(sequence.batch, head, sequence.query_begin + tile * kQueries + i / columns);
      row[i % columns * dq.column_stride] = Element(0.0f);
    }
  }
};

template <class Element>
__global__ void __launch_bounds__(kPrepareThreads)
    prepare_kernel(const __grid_constant__ BackwardArguments args, const __grid_constant__ PrepareGrid grid) {
  ptx::allow_dependent_launch();
  Prepare<Element>{args}.run(grid);
}

}  // namespace flash_attn_ext::sm90
