#pragma once

#include <algorithm>

#include "kernels/dispatch.h"
#include "kernels/sm80/forward.cuh"
#include "kernels/sm80/launch.cuh"
#include "kernels/sm80/sm80_kernels.h"

namespace flash_attn_ext::sm80 {

template <class Element>
cudaError_t forward(const attention::ForwardParams& p, cudaStream_t stream) {
  return with_head_dim(std::max(p.head_dim_qk, p.head_dim_v), [&](auto head_dim) {
    const auto run = [&](auto score) {
      using Kernel = ForwardKernel<KernelTraits<Element, head_dim(), score()>>;
      const int64_t tiles = num_tiles(p.sequences.max_seqlen_q, Kernel::kTile.queries);
      return launch<Kernel>(forward_kernel<Kernel>, p, p.batch * p.num_heads_q * tiles, stream);
    };
    return has_plain_scores(p) ? run(std::integral_constant<Score, Score::kPlain>{})
                               : run(std::integral_constant<Score, Score::kExtended>{});
  });
}

}  // namespace flash_attn_ext::sm80
