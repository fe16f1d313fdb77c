// Launches the single-tile kernel that a plan names.
#pragma once

#include <algorithm>

#include "kernels/common/launch/launch_early.cuh"
#include "kernels/common/launch/with_row.h"
#include "kernels/plan/plan.h"
#include "kernels/sm90/forward/single_tile/single_tile.cuh"
#include "kernels/sm90/sm90_kernels.h"
#include "kernels/sm90/tensor_map.h"

namespace flash_attn_ext::sm90 {

template <class Traits>
cudaError_t launch_single_tile(const ForwardCall& p, const plan::ForwardPlan& plan, void* workspace,
                               cudaStream_t stream) {
  using Kernel = KernelShape<SingleTileShared, Traits>;
  static_assert(sizeof(typename Kernel::Shared) <= kSharedBytes);
  SingleTileArguments args;
  args.params = p;
  args.intervals = p.intervals;
  args.scale_log2e = static_cast<float>(p.score_mod.scale) * kLog2e;
  args.schedule = make_schedule(p, {.pairs = all_pairs(p),
                                    .order = forward_pair_order(p),
                                    .rows = Rows::kQueries,
                                    .tile_rows = plan.tile.queries,
                                    .slices = 1,
                                    .element_bytes = sizeof(typename Traits::Element),
                                    .l2_bytes = plan.l2_bytes});
  args.query_tiles = plan.tile.queries / tile::kWarpgroupRows;
  args.nan_flags = plan.workspace.nan_flags.template in<uint8_t>(workspace);
  if (args.schedule.num_blocks == 0) return cudaSuccess;
  if (args.schedule.num_blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const cudaError_t error = make_tma_descriptors(args, tile::kWarpgroupRows, Traits::kKeys);
  if (error != cudaSuccess) return error;
  args.out = make_output_map(p);
  const int64_t blocks = std::min<int64_t>(args.schedule.num_blocks, plan.persistent_ctas);
  return common::launch_blocks_early<Kernel>(single_tile_kernel<Traits>, blocks, stream, args);
}

template <class Element>
cudaError_t forward_single_tile(const ForwardCall& call, const plan::ForwardPlan& plan, void* workspace,
                                cudaStream_t stream) {
  return common::with_row<kSingleTileConfigs>(plan.row, [&](auto row) {
    return launch_single_tile<SingleTileTraits<Element, kSingleTileConfigs[row()]>>(call, plan, workspace, stream);
  });
}

}  // namespace flash_attn_ext::sm90
