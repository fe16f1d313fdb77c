// dQ = scale * the sum of its parts, in a fixed order.
//
// Grid: halves of 64 queries of all pairs, times slices of columns (dq_slice.cuh): one for all warpgroups of a block,
// which share the parts, or where there are few, one for each of them.
#pragma once

#include "kernels/sm90/backward_few_queries/arguments.h"
#include "kernels/sm90/dq_slice.cuh"
#include "ptx/dependent_launch.h"

namespace flash_attn_ext::sm90 {

// How many slices a block has, where so many blocks share a pair.
inline int slices_of_sum(int64_t parts) { return parts > DqSlice::kAhead ? 1 : DqSlice::kWarpgroups; }

template <class Element>
struct FewQueriesSum {
  const FewQueriesArguments& args;
  const int pair;
  const int half;  // of the queries

  __device__ __forceinline__ void run() const {
    const bool shared = args.slices_of_sum == 1;
    const int warpgroup = DqSlice::warpgroup();
    const int number = static_cast<int>(blockIdx.y) * args.slices_of_sum + (shared ? 0 : warpgroup);
    const int slices = static_cast<int>(gridDim.y) * args.slices_of_sum;
    const PartNumbers parts = args.line.part_numbers(pair, args.tiles);
    DqSlice slice;
    slice.add(parts.begin + (shared ? warpgroup : 0), parts.end, shared ? DqSlice::kWarpgroups : 1, [&](int part) {
      return args.dq_parts + ((int64_t{part} * 2 + half) * slices + number) * DqSlice::kFloats;
    });
    if (shared) {
      slice.join();
      if (warpgroup != 0) return;
    }
    store(slice, number * DqSlice::kColumns);
  }

 private:
  __device__ __forceinline__ void store(const DqSlice& slice, int first_column) const {
    const attention::BackwardParams& p = args.params;
    const auto batch = static_cast<int>(p.batch);
    const int warp = half * 4 + tile::warp() % 4;
    const OutputRows<Element> target = {.data = p.dq.row<Element>(pair % batch, pair / batch, warp * 16) + first_column,
                                        .row_stride = p.dq.row_stride,
                                        .column_stride = 1,
                                        .rows = static_cast<int>(p.sequences.max_seqlen_q) - warp * 16,
                                        .columns = static_cast<int>(p.head_dim_qk) - first_column};
    if (slice.store(target, args.scale)) args.dq_nan_flags[pair * FewQueriesArguments::kQueryFlags + warp] = 1;
  }
};

template <class Element>
__global__ void __launch_bounds__(DqSlice::kThreads)
    few_queries_sum_kernel(const __grid_constant__ FewQueriesArguments args) {
  ptx::wait_for_kernel_before();
  const auto block = static_cast<int>(blockIdx.x);
  FewQueriesSum<Element>{args, block / 2, block % 2}.run();
}

}  // namespace flash_attn_ext::sm90
