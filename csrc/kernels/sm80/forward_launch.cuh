#pragma once

#include "kernels/sm80/forward.cuh"
#include "kernels/sm80/launch.cuh"
#include "kernels/sm80/launch_tags.cuh"
#include "kernels/sm80/sm80_kernels.h"

namespace flash_attn_ext::sm80 {

template <class Element, int kHeadDim>
cudaError_t forward(const attention::ForwardParams& p, cudaStream_t stream) {
  return with_forward_variant<Element, kHeadDim>(p, [&](auto variant) {
    using Kernel = ForwardKernel<KernelTraits<Element, kHeadDim, variant()>>;
    const int64_t slices = num_slices(p.head_dim_v, Kernel::kTile.columns);
    const Schedule schedule =
        make_schedule(p, all_pairs(p), Rows::kQueries, Kernel::kTile.queries, slices, sizeof(Element));
    return launch<Kernel>(forward_kernel<Kernel>, p, schedule, stream);
  });
}

}  // namespace flash_attn_ext::sm80
