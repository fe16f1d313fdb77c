#pragma once

#include <algorithm>

#include "kernels/dispatch.h"
#include "kernels/sm80/backward_dalibi.cuh"
#include "kernels/sm80/backward_dbias.cuh"
#include "kernels/sm80/backward_dkdv.cuh"
#include "kernels/sm80/backward_dq.cuh"
#include "kernels/sm80/launch.cuh"
#include "kernels/sm80/sm80_kernels.h"

namespace flash_attn_ext::sm80 {

// Calls function(bucket, score).
template <class Function>
cudaError_t with_backward_tags(const attention::BackwardParams& p, Function&& function) {
  return with_head_dim(std::max(p.head_dim_qk, p.head_dim_v), [&](auto head_dim) {
    return has_plain_scores(p) ? function(head_dim, std::integral_constant<Score, Score::kPlain>{})
                               : function(head_dim, std::integral_constant<Score, Score::kExtended>{});
  });
}

template <class Kernel>
cudaError_t launch_dkdv(const attention::BackwardParams& p, cudaStream_t stream) {
  const int64_t tiles = num_tiles(p.sequences.max_seqlen_k, Kernel::kTile.keys);
  return launch<Kernel>(backward_dkdv_kernel<Kernel>, p, p.batch * p.num_heads_k * tiles, stream);
}

template <class Element>
cudaError_t backward_dkdv(const attention::BackwardParams& p, cudaStream_t stream) {
  return with_backward_tags(p, [&](auto head_dim, auto score) {
    if constexpr (head_dim() <= 128) {
      return launch_dkdv<BackwardDkdvKernel<KernelTraits<Element, head_dim(), score()>, KeyGradient::kBoth>>(p, stream);
    } else {
      // The two accumulators do not fit into registers together.
      using Dv = BackwardDkdvKernel<KernelTraits<Element, head_dim(), score()>, KeyGradient::kDv>;
      using Dk = BackwardDkdvKernel<KernelTraits<Element, head_dim(), score()>, KeyGradient::kDk>;
      const cudaError_t error = launch_dkdv<Dv>(p, stream);
      return error != cudaSuccess ? error : launch_dkdv<Dk>(p, stream);
    }
  });
}

template <class Element>
cudaError_t backward_dq(const attention::BackwardParams& p, cudaStream_t stream) {
  return with_backward_tags(p, [&](auto head_dim, auto score) {
    using Kernel = BackwardDqKernel<KernelTraits<Element, head_dim(), score()>>;
    const int64_t tiles = num_tiles(p.sequences.max_seqlen_q, Kernel::kTile.queries);
    return launch<Kernel>(backward_dq_kernel<Kernel>, p, p.batch * p.num_heads_q * tiles, stream);
  });
}

template <class Element>
cudaError_t backward_dbias(const attention::BackwardParams& p, cudaStream_t stream) {
  return with_head_dim(std::max(p.head_dim_qk, p.head_dim_v), [&](auto head_dim) {
    using Kernel = BackwardDbiasKernel<Element, head_dim()>;
    const int64_t blocks =
        Kernel::batches(p).count() * Kernel::heads(p).count() * Kernel::queries(p).count() * Kernel::keys(p).count();
    return launch<Kernel>(backward_dbias_kernel<Kernel>, p, blocks, stream);
  });
}

template <class Element>
cudaError_t backward_dalibi(const attention::BackwardParams& p, cudaStream_t stream) {
  return with_head_dim(std::max(p.head_dim_qk, p.head_dim_v), [&](auto head_dim) {
    using Kernel = BackwardDalibiKernel<Element, head_dim()>;
    return launch<Kernel>(backward_dalibi_kernel<Kernel>, p, p.batch * p.num_heads_q * p.alibi_partials_per_head,
                          stream);
  });
}

}  // namespace flash_attn_ext::sm80
