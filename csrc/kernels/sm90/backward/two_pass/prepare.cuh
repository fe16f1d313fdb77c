// Prepares what the dQ kernel and the GEMM kernel need: delta and the LSE in tiles, and zeros in work counters and
// non-finite flags.
//
// Grid: one CTA for each query tile of each head. Bound: memory, as in common/sums/delta.cu.
#pragma once

#include "attention/division.h"
#include "kernels/sm90/backward/two_pass/arguments.h"
#include "kernels/sm90/backward/two_pass/query_statistics.cuh"
#include "ptx/dependent_launch.h"

namespace flash_attn_ext::sm90 {

struct TwoPassPrepareGrid {
  attention::Divisor tiles;  // query tiles of the longest sequence
  attention::Divisor heads;
  int64_t blocks;
  int64_t key_flags;
};

inline constexpr int kTwoPassPrepareThreads = 256;

// All threads of the grid call it.
__device__ __forceinline__ void clear_counters_and_flags(const TwoPassArguments& args, const TwoPassPrepareGrid& grid) {
  const TwoPassWorkspace& workspace = args.workspace;
  const int64_t step = grid.blocks * kTwoPassPrepareThreads;
  const int64_t first = int64_t{blockIdx.x} * kTwoPassPrepareThreads + threadIdx.x;
  for (int64_t i = first; i < workspace.num_work_tiles; i += step) workspace.work_counters[i] = 0;
  for (int64_t i = first; i < grid.blocks * 4; i += step) workspace.dq_nan_flags[i] = 0;
  for (int64_t i = first; i < grid.key_flags; i += step) workspace.dkdv_nan_flags[i] = 0;
}

template <class Element>
__global__ void __launch_bounds__(kTwoPassPrepareThreads)
    two_pass_prepare_kernel(const __grid_constant__ TwoPassArguments args,
                            const __grid_constant__ TwoPassPrepareGrid grid) {
  ptx::wait_for_kernel_before();
  clear_counters_and_flags(args, grid);
  const attention::BackwardParams& p = args.params;
  const uint32_t index = grid.tiles.quotient(blockIdx.x);
  const auto tile = static_cast<int>(blockIdx.x - index * grid.tiles.divisor);
  const auto batch = static_cast<int>(grid.heads.quotient(index));
  const auto head = static_cast<int>(index - batch * grid.heads.divisor);
  const attention::Sequence sequence = p.sequences.at(batch);
  if (tile >= ScoreTiles::num_tiles(sequence.num_queries)) return;
  const int64_t place = int64_t{head} * args.workspace.tiles_of_head + TwoPassWorkspace::first_tile(p, sequence) + tile;
  const auto rows = static_cast<int>(min(sequence.num_queries - tile * ScoreTiles::kRows, int64_t{ScoreTiles::kRows}));
  QueryTileStatistics<Element, kTwoPassPrepareThreads>{p, sequence, head, tile, rows, args.scales_lse}.write(
      args.workspace.statistics_of(place));
}

}  // namespace flash_attn_ext::sm90
