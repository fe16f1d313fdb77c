// Launches the forward kernel that a plan names.
#pragma once

#include "kernels/sm80/dispatch.h"
#include "kernels/sm80/forward/forward.cuh"
#include "kernels/sm80/launch.cuh"
#include "kernels/sm80/sm80_kernels.h"

namespace flash_attn_ext::sm80 {

template <class Element, int kHeadDim>
cudaError_t forward(const ForwardParams& p, const ForwardPlan& plan, cudaStream_t stream) {
  return with_row_of<kForwardConfigs, Element, kHeadDim>(plan.row, [&](auto row) {
    constexpr ForwardConfig kConfig = kForwardConfigs[row()];
    using Kernel = ForwardKernel<KernelTraits<Element, kConfig>>;
    const Schedule schedule = make_schedule(p, {.pairs = all_pairs(p),
                                                .rows = Rows::kQueries,
                                                .tile_rows = Kernel::kTile.queries,
                                                .slices = num_slices(p.head_dim_v, Kernel::kTile.columns),
                                                .element_bytes = sizeof(Element),
                                                .l2_bytes = plan.l2_bytes});
    const cudaError_t error = launch<Kernel>(forward_kernel<Kernel>, p, schedule, stream);
    if (kConfig.repairs_in_kernel || error != cudaSuccess) return error;
    return common::repair_forward<InMemory<Element>>(p, flagged_rows<Kernel>(p.nan_flags, schedule), stream);
  });
}

}  // namespace flash_attn_ext::sm80
