// dQ = scale * the sum of its partial dQ, in a fixed order.
//
// Grid: two halves of 64 queries of each pair, times slices of columns (dq_slice.cuh). The warpgroups of a CTA share
// the splits of one slice, or where there are few splits, each has a slice of its own.
#pragma once

#include "kernels/sm90/backward/query_stationary/traits.h"
#include "kernels/sm90/dq_slice.cuh"
#include "ptx/dependent_launch.h"

namespace flash_attn_ext::sm90 {

// How many slices a CTA has where each pair has this many splits.
inline int slices_of_sum(int64_t splits) { return splits > DqSlice::kAhead ? 1 : DqSlice::kWarpgroups; }

template <class Element>
struct QueryStationarySum {
  const QueryStationaryArguments& args;
  const int pair;
  const int half;  // of the queries

  __device__ __forceinline__ void run() const {
    const bool shared = args.slices_of_sum == 1;
    const int warpgroup = DqSlice::warpgroup();
    const int slice_index = static_cast<int>(blockIdx.y) * args.slices_of_sum + (shared ? 0 : warpgroup);
    const int slices = static_cast<int>(gridDim.y) * args.slices_of_sum;
    const SplitRange splits = args.work_list.split_range(pair, args.tiles);
    DqSlice slice;
    slice.add(splits.begin + (shared ? warpgroup : 0), splits.end, shared ? DqSlice::kWarpgroups : 1, [&](int split) {
      return args.dq_partials + ((int64_t{split} * 2 + half) * slices + slice_index) * DqSlice::kFloats;
    });
    if (shared) {
      slice.combine();
      if (warpgroup != 0) return;
    }
    store(slice, slice_index * DqSlice::kColumns);
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
    if (slice.store(target, args.scale)) args.dq_nan_flags[pair * QueryStationaryArguments::kQueryFlags + warp] = 1;
  }
};

template <class Element>
__global__ void __launch_bounds__(DqSlice::kThreads)
    query_stationary_sum_kernel(const __grid_constant__ QueryStationaryArguments args) {
  ptx::wait_for_kernel_before();
  const auto block = static_cast<int>(blockIdx.x);
  QueryStationarySum<Element>{args, block / 2, block % 2}.run();
}

}  // namespace flash_attn_ext::sm90
