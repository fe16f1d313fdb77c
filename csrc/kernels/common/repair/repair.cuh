// The repair kernels (repair.h).
//
// Grid: one CTA per kFlagsPerBlock flags, those of queries first. Its warps share the rows of each flagged warp of the
// tensor-core kernel.
#pragma once

#include "attention/division.h"
#include "kernels/common/launch/launch_early.cuh"
#include "kernels/common/repair/repair.h"
#include "kernels/common/rows/attention_rows.cuh"
#include "kernels/schedule/block.cuh"
#include "ptx/dependent_launch.h"

namespace flash_attn_ext::common {

inline constexpr int kRepairThreads = 256;
inline constexpr int kFlagsPerBlock = 64;

FLASH_HOST_DEVICE uint32_t num_blocks(const FlaggedRows& rows) {
  return attention::ceil_div(rows.num_flags(), kFlagsPerBlock);
}

// Calls function(place, first row in the tile) for each flagged warp of the tensor-core kernel whose flag is among
// those of the calling CTA, the block-th of `rows`.
template <class Function>
__device__ __forceinline__ void for_each_flagged(const FlaggedRows& rows, uint32_t block, Function&& function) {
  const uint32_t first = block * kFlagsPerBlock;
  const uint32_t own = first + threadIdx.x;
  const bool flagged = threadIdx.x < kFlagsPerBlock && own < rows.num_flags() && rows.flags[own] != 0;
  if (!__syncthreads_or(flagged)) return;
  const uint32_t end = min(first + kFlagsPerBlock, rows.num_flags());
#pragma unroll 1
  for (uint32_t index = first; index < end; ++index) {
    if (rows.flags[index] == 0) continue;
    const uint32_t tile = index / rows.warps;
    function(rows.schedule.place(tile), static_cast<int>(index - tile * rows.warps) * rows.rows_per_warp);
  }
}

__device__ __forceinline__ ColumnRange columns_of(const FlaggedRows& rows, const Place& at) {
  const int first = static_cast<int>(at.slice) * rows.columns;
  return {first, first + rows.columns};
}

// Calls function(coord, query, columns), one warp at a time, for each row of flagged queries.
template <class Function>
__device__ __forceinline__ void for_each_flagged_query(const attention::AttentionParams& p, const FlaggedRows& rows,
                                                       uint32_t block, Function&& function) {
  for_each_flagged(rows, block, [&](const Place& at, int row) {
    const attention::Sequence sequence = p.sequences.at(at.batch);
    const HeadRows coord = head_rows(p, sequence, at.key_head * rows.schedule.group + at.head_of_group);
    const int64_t begin = first_query_of(rows.schedule, at, rows.warps * rows.rows_per_warp) + row;
    const int64_t end = min(begin + rows.rows_per_warp, sequence.num_queries);
    for (int64_t query = begin + tile::warp(); query < end; query += kRepairThreads / kWarpSize) {
      function(coord, query, columns_of(rows, at));
    }
  });
}

template <class Element>
__global__ void __launch_bounds__(kRepairThreads)
    repair_forward_kernel(const __grid_constant__ attention::ForwardParams p,
                          const __grid_constant__ FlaggedRows rows) {
  ptx::wait_for_kernel_before();
  for_each_flagged_query(p, rows, blockIdx.x, [&](const HeadRows& coord, int64_t query, const ColumnRange& columns) {
    compute_forward_row<Element>(p, coord, query, columns);
  });
}

template <class Element>
__global__ void __launch_bounds__(kRepairThreads)
    repair_gradients_kernel(const __grid_constant__ attention::BackwardParams p,
                            const __grid_constant__ FlaggedRows queries, const __grid_constant__ FlaggedRows keys) {
  ptx::wait_for_kernel_before();
  if (blockIdx.x < num_blocks(queries)) {
    for_each_flagged_query(p, queries, blockIdx.x,
                           [&](const HeadRows& coord, int64_t query, const ColumnRange& columns) {
                             compute_dq_row<Element>(p, coord, query, columns);
                           });
    return;
  }
  for_each_flagged(keys, blockIdx.x - num_blocks(queries), [&](const Place& at, int row) {
    const attention::Sequence sequence = p.sequences.at(at.batch);
    const int64_t begin = first_key_of(keys.schedule, at, keys.warps * keys.rows_per_warp, sequence.num_keys) + row;
    const int64_t end = min(begin + keys.rows_per_warp, sequence.num_keys);
    if (begin < row) return;  // a tile that the sequence does not have
    for (int64_t key = begin + tile::warp(); key < end; key += kRepairThreads / kWarpSize) {
      compute_dkdv_row<Element>(p, sequence, at.key_head, key, columns_of(keys, at));
    }
  });
}

template <class Element>
cudaError_t repair_forward(const attention::ForwardParams& params, const FlaggedRows& rows, cudaStream_t stream) {
  const int64_t blocks = num_blocks(rows);
  if (blocks == 0) return cudaSuccess;
  return launch_early(repair_forward_kernel<Element>, {.blocks = blocks, .threads = kRepairThreads}, stream, params,
                      rows);
}

template <class Element>
cudaError_t repair_gradients(const attention::BackwardParams& params, const FlaggedRows& queries,
                             const FlaggedRows& keys, cudaStream_t stream) {
  const int64_t blocks = int64_t{num_blocks(queries)} + num_blocks(keys);
  if (blocks == 0) return cudaSuccess;
  return launch_early(repair_gradients_kernel<Element>, {.blocks = blocks, .threads = kRepairThreads}, stream, params,
                      queries, keys);
}

}  // namespace flash_attn_ext::common
