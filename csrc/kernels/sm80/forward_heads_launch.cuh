#pragma once

#include "kernels/sm80/forward_heads.cuh"
#include "kernels/sm80/launch.cuh"
#include "kernels/sm80/sm80_kernels.h"

namespace flash_attn_ext::sm80 {

template <class Element>
cudaError_t forward_heads(const attention::ForwardParams& p, cudaStream_t stream) {
  using Kernel = ForwardHeadsKernel<Element>;
  const Schedule schedule = make_schedule(p, all_pairs(p), Rows::kQueries, kHeadsRows, 1, sizeof(Element));
  return launch_resident<Kernel>(forward_heads_kernel<Kernel>, p, schedule, kHeadsBlocks, stream);
}

}  // namespace flash_attn_ext::sm80
