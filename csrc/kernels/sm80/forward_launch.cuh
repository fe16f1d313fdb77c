#pragma once

#include "kernels/sm80/forward.cuh"
#include "kernels/sm80/launch.cuh"
#include "kernels/sm80/launch_tags.cuh"
#include "kernels/sm80/sm80_kernels.h"

namespace flash_attn_ext::sm80 {

template <class Element, int kHeadDim>
cudaError_t forward(const attention::ForwardParams& p, cudaStream_t stream) {
  return with_score(p, [&](auto score) {
    using Kernel = ForwardKernel<KernelTraits<Element, kHeadDim, score()>>;
    const int64_t tiles = num_tiles(p.sequences.max_seqlen_q, Kernel::kTile.queries);
    const int64_t slices = num_slices(p.head_dim_v, Kernel::kTile.columns);
    return launch<Kernel>(forward_kernel<Kernel>, p, p.batch * p.num_heads_q * tiles * slices, stream);
  });
}

}  // namespace flash_attn_ext::sm80
