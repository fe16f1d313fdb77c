// The repair kernels (repair.h).
//
// Grid: one block per kFlagsPerBlock flags. Its warps share the rows of each flagged warp of the tensor-core kernel.
#pragma once

#include "kernels/common/repair.h"
#include "kernels/common/rows/attention_rows.cuh"
#include "kernels/schedule/block.cuh"

namespace flash_attn_ext::common {

inline constexpr int kRepairThreads = 256;
inline constexpr int kFlagsPerBlock = 64;

// Calls function(place, first row in the block's tile) for each flagged warp of the tensor-core kernel.
template <class Function>
__device__ __forceinline__ void for_each_flagged(const FlaggedRows& rows, Function&& function) {
  const uint32_t num_flags = rows.schedule.num_blocks * rows.warps;
  const uint32_t first = blockIdx.x * kFlagsPerBlock;
  const uint32_t own = first + threadIdx.x;
  const bool flagged = threadIdx.x < kFlagsPerBlock && own < num_flags && rows.flags[own] != 0;
  if (!__syncthreads_or(flagged)) return;
  const uint32_t end = min(first + kFlagsPerBlock, num_flags);
#pragma unroll 1
  for (uint32_t index = first; index < end; ++index) {
    if (rows.flags[index] == 0) continue;
    const uint32_t block = index / rows.warps;
    function(rows.schedule.place(block), static_cast<int>(index - block * rows.warps) * rows.rows_per_warp);
  }
}

__device__ __forceinline__ ColumnRange columns_of(const FlaggedRows& rows, const Place& at) {
  const int first = static_cast<int>(at.slice) * rows.columns;
  return {first, first + rows.columns};
}

// Calls function(item, query, columns), a warp at a time, for each row of flagged queries.
template <class Function>
__device__ __forceinline__ void for_each_flagged_query(const attention::AttentionParams& p, const FlaggedRows& rows,
                                                       Function&& function) {
  for_each_flagged(rows, [&](const Place& at, int row) {
    const attention::Sequence sequence = p.sequences.at(at.batch);
    const HeadItem item = head_item(p, sequence, at.key_head * rows.schedule.group + at.head_of_group);
    const int64_t begin = first_query_of(rows.schedule, at, rows.warps * rows.rows_per_warp) + row;
    const int64_t end = min(begin + rows.rows_per_warp, sequence.num_queries);
    for (int64_t query = begin + tile::warp(); query < end; query += kRepairThreads / kWarpSize) {
      function(item, query, columns_of(rows, at));
    }
  });
}

template <class Element>
__global__ void __launch_bounds__(kRepairThreads)
    repair_forward_kernel(const __grid_constant__ attention::ForwardParams p,
                          const __grid_constant__ FlaggedRows rows) {
  for_each_flagged_query(p, rows, [&](const HeadItem& item, int64_t query, const ColumnRange& columns) {
    compute_forward_row<Element>(p, item, query, columns);
  });
}

template <class Element>
__global__ void __launch_bounds__(kRepairThreads)
    repair_dq_kernel(const __grid_constant__ attention::BackwardParams p, const __grid_constant__ FlaggedRows rows) {
  for_each_flagged_query(p, rows, [&](const HeadItem& item, int64_t query, const ColumnRange& columns) {
    compute_dq_row<Element>(p, item, query, columns);
  });
}

template <class Element>
__global__ void __launch_bounds__(kRepairThreads)
    repair_dkdv_kernel(const __grid_constant__ attention::BackwardParams p, const __grid_constant__ FlaggedRows rows) {
  for_each_flagged(rows, [&](const Place& at, int row) {
    const attention::Sequence sequence = p.sequences.at(at.batch);
    const int64_t begin = first_key_of(rows.schedule, at, rows.warps * rows.rows_per_warp, sequence.num_keys) + row;
    const int64_t end = min(begin + rows.rows_per_warp, sequence.num_keys);
    if (begin < row) return;  // a tile that the sequence does not have
    for (int64_t key = begin + tile::warp(); key < end; key += kRepairThreads / kWarpSize) {
      compute_dkdv_row<Element>(p, sequence, at.key_head, key, columns_of(rows, at));
    }
  });
}

template <class Params>
cudaError_t launch_repair(void (*kernel)(Params, FlaggedRows), const Params& params, const FlaggedRows& rows,
                          cudaStream_t stream) {
  const int64_t flags = int64_t{rows.schedule.num_blocks} * rows.warps;
  const int64_t blocks = (flags + kFlagsPerBlock - 1) / kFlagsPerBlock;
  if (blocks == 0) return cudaSuccess;
  kernel<<<static_cast<unsigned>(blocks), kRepairThreads, 0, stream>>>(params, rows);
  return cudaGetLastError();
}

template <class Element>
cudaError_t repair_forward(const attention::ForwardParams& params, const FlaggedRows& rows, cudaStream_t stream) {
  return launch_repair(repair_forward_kernel<Element>, params, rows, stream);
}
template <class Element>
cudaError_t repair_dq(const attention::BackwardParams& params, const FlaggedRows& rows, cudaStream_t stream) {
  return launch_repair(repair_dq_kernel<Element>, params, rows, stream);
}
template <class Element>
cudaError_t repair_dkdv(const attention::BackwardParams& params, const FlaggedRows& rows, cudaStream_t stream) {
  return launch_repair(repair_dkdv_kernel<Element>, params, rows, stream);
}

}  // namespace flash_attn_ext::common
