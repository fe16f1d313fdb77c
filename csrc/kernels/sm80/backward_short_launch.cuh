#pragma once

#include "kernels/sm80/backward_short.cuh"
#include "kernels/sm80/launch.cuh"
#include "kernels/sm80/sm80_kernels.h"

namespace flash_attn_ext::sm80 {

template <class Kernel>
cudaError_t launch_short(const attention::BackwardParams& p, cudaStream_t stream) {
  const Schedule schedule = make_schedule(p, {p.first_pair, p.num_pairs}, Rows::kKeys, Kernel::kTile.keys, 1,
                                          sizeof(typename Kernel::Element));
  return launch<Kernel>(backward_short_kernel<Kernel>, p, schedule, stream);
}

template <class Element>
cudaError_t backward_short(const attention::BackwardParams& p, cudaStream_t stream) {
  const int64_t keys = p.sequences.max_seqlen_k;
  if (keys <= 64) return launch_short<BackwardShortKernel<Element, 64>>(p, stream);
  if (keys <= 128) return launch_short<BackwardShortKernel<Element, 128>>(p, stream);
  return launch_short<BackwardShortKernel<Element, 256>>(p, stream);
}

}  // namespace flash_attn_ext::sm80
