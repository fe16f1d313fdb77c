// Launches the fused backward kernel that a plan names.
#pragma once

#include "kernels/common/launch/launch_early.cuh"
#include "kernels/sm80/backward/backward_fused.cuh"
#include "kernels/sm80/dispatch.h"
#include "kernels/sm80/launch.cuh"
#include "kernels/sm80/sm80_kernels.h"

namespace flash_attn_ext::sm80 {

template <class Element>
cudaError_t backward_fused(const BackwardParams& p, const BackwardPlan& plan, cudaStream_t stream) {
  return common::with_row<kFusedConfigs>(plan.fused_row, [&](auto row) {
    using Kernel = BackwardFusedKernel<Element, kFusedConfigs[row()]>;
    const Schedule schedule = make_schedule(p, {.pairs = {p.first_pair, p.num_pairs},
                                                .rows = Rows::kKeys,
                                                .tile_rows = Kernel::kTile.keys,
                                                .slices = 1,
                                                .element_bytes = sizeof(Element),
                                                .l2_bytes = plan.l2_bytes});
    static_assert(sizeof(typename Kernel::Shared) <= kSharedBytes);
    return common::launch_blocks_early<Kernel>(backward_fused_kernel<Kernel>, {schedule.num_blocks, schedule.splits},
                                               stream, p, schedule);
  });
}

}  // namespace flash_attn_ext::sm80
