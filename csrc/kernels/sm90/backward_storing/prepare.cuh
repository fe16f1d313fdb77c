// What the dQ kernel and the products need before they start: delta, with the LSE, in tiles; zeros where blocks claim
// their work, and in flags.
//
// Grid: a block per tile of queries of each head. Bound: memory, as in common/delta.cu.
#pragma once

#include "attention/divisor.h"
#include "kernels/sm90/backward_storing/arguments.h"
#include "kernels/sm90/backward_storing/query_statistics.cuh"
#include "ptx/dependent_launch.h"

namespace flash_attn_ext::sm90 {

struct StoringPrepareGrid {
  attention::Divisor tiles;  // of the longest sequence's queries
  attention::Divisor heads;
  int64_t blocks;
  int64_t key_flags;
};

inline constexpr int kStoringPrepareThreads = 256;

// By all threads of the grid.
__device__ __forceinline__ void clear_claims_and_flags(const StoringArguments& args, const StoringPrepareGrid& grid) {
  const StoringWorkspace& workspace = args.workspace;
  const int64_t step = grid.blocks * kStoringPrepareThreads;
  const int64_t first = int64_t{blockIdx.x} * kStoringPrepareThreads + threadIdx.x;
  for (int64_t i = first; i < workspace.num_claims; i += step) workspace.claims[i] = 0;
  for (int64_t i = first; i < grid.blocks * 4; i += step) workspace.dq_nan_flags[i] = 0;
  for (int64_t i = first; i < grid.key_flags; i += step) workspace.dkdv_nan_flags[i] = 0;
}

template <class Element>
__global__ void __launch_bounds__(kStoringPrepareThreads)
    storing_prepare_kernel(const __grid_constant__ StoringArguments args,
                           const __grid_constant__ StoringPrepareGrid grid) {
  ptx::wait_for_kernel_before();
  clear_claims_and_flags(args, grid);
  const attention::BackwardParams& p = args.params;
  const uint32_t index = grid.tiles.quotient(blockIdx.x);
  const auto tile = static_cast<int>(blockIdx.x - index * grid.tiles.divisor);
  const auto batch = static_cast<int>(grid.heads.quotient(index));
  const auto head = static_cast<int>(index - batch * grid.heads.divisor);
  const attention::Sequence sequence = p.sequences.at(batch);
  if (tile >= ScoreTiles::num_tiles(sequence.num_queries)) return;
  const int64_t place = int64_t{head} * args.workspace.tiles_of_head + StoringWorkspace::first_tile(p, sequence) + tile;
  const auto rows = static_cast<int>(min(sequence.num_queries - tile * ScoreTiles::kRows, int64_t{ScoreTiles::kRows}));
  QueryTileStatistics<Element, kStoringPrepareThreads>{p, sequence, head, tile, rows, args.scales_lse}.write(
      args.workspace.statistics_of(place));
}

}  // namespace flash_attn_ext::sm90
