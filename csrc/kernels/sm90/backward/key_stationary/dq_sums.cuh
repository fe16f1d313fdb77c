// The combine kernel of split-KV (LoopDirection::kSplitKv), where each phase of key tiles has an accumulator of its
// own: dQ is scale times the sum of these, in a fixed order.
//
// Grid: query tiles of all heads, times slices of columns (dq_slice.cuh). The warpgroups of a CTA share the phases.
#pragma once

#include "kernels/sm90/backward/key_stationary/arguments.h"
#include "kernels/sm90/dq_slice.cuh"
#include "ptx/dependent_launch.h"

namespace flash_attn_ext::sm90 {

template <class Element>
struct DqSums {
  const KeyStationaryArguments& args;
  const attention::Sequence sequence;
  const QueryTile at;

  __device__ __forceinline__ void run() const {
    const LoopOrder::Tiles contributors =
        args.order.contributor(args.params.visibility, sequence, 0, LoopDirection::kSplitKv).contributors(at.tile);
    if (contributors.end - contributors.begin < 2) return;  // dQ is 0 already, or the only contributor has written it
    const int index = args.workspace.index_of(args.params, sequence, at);
    const int phases_of_all = 1 << args.order.log2_accumulators;
    const int phases = min(contributors.end - contributors.begin, phases_of_all);
    DqSlice slice;
    slice.add(DqSlice::warpgroup(), phases, DqSlice::kWarpgroups, [&](int contributor) {
      const int accumulator = args.order.accumulator_of(index, contributors.begin + contributor & phases_of_all - 1);
      return args.workspace.dq_sums + (int64_t{accumulator} * gridDim.y + blockIdx.y) * DqSlice::kFloats;
    });
    slice.combine();
    if (DqSlice::warpgroup() == 0) store(slice);
  }

 private:
  static_assert(LoopOrder::kQueries == tile::kWarpgroupRows);

  __device__ __forceinline__ void store(const DqSlice& slice) const {
    const attention::BackwardParams& p = args.params;
    const int first_row = at.tile * LoopOrder::kQueries + tile::warp() * 16;
    const int first_column = static_cast<int>(blockIdx.y) * DqSlice::kColumns;
    const OutputRows<Element> target = {
        .data = p.dq.row<Element>(sequence.batch, at.head, sequence.query_begin + first_row) + first_column,
        .row_stride = p.dq.row_stride,
        .column_stride = 1,
        .rows = static_cast<int>(sequence.num_queries) - first_row,
        .columns = static_cast<int>(p.head_dim_qk) - first_column};
    if (slice.store(target, args.gradient_scale)) args.workspace.dq_nan_flag(p, at, tile::warp()) = 1;
  }
};

template <class Element>
__global__ void __launch_bounds__(DqSlice::kThreads)
    sum_dq_kernel(const __grid_constant__ KeyStationaryArguments args, const __grid_constant__ QueryTileGrid grid) {
  ptx::wait_for_kernel_before();
  const QueryTile at = grid.at(blockIdx.x);
  const attention::Sequence sequence = args.sequence(at.batch);
  if (at.tile < LoopOrder::num_tiles(sequence.num_queries, LoopOrder::kQueries)) {
    DqSums<Element>{args, sequence, at}.run();
  }
}

}  // namespace flash_attn_ext::sm90
