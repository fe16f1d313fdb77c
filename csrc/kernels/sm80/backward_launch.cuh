#pragma once

#include <algorithm>

#include "kernels/sm80/backward_dalibi.cuh"
#include "kernels/sm80/backward_dbias.cuh"
#include "kernels/sm80/backward_delta.cuh"
#include "kernels/sm80/backward_dkdv.cuh"
#include "kernels/sm80/backward_dq.cuh"
#include "kernels/sm80/launch.cuh"
#include "kernels/sm80/launch_tags.cuh"
#include "kernels/sm80/sm80_kernels.h"

namespace flash_attn_ext::sm80 {

template <class Kernel>
cudaError_t launch_dkdv(const attention::BackwardParams& p, cudaStream_t stream) {
  const int64_t slices = num_slices(std::max(p.head_dim_qk, p.head_dim_v), Kernel::kTile.columns);
  const Schedule schedule = make_schedule(p, {p.first_pair, p.num_pairs}, Rows::kKeys, Kernel::kTile.keys, slices,
                                          sizeof(typename Kernel::Element));
  return launch<Kernel>(backward_dkdv_kernel<Kernel>, p, schedule, stream);
}

template <class Element, int kHeadDim>
cudaError_t backward_dkdv(const attention::BackwardParams& p, cudaStream_t stream) {
  return with_backward_variant(p, [&](auto variant) {
    using Traits = KernelTraits<Element, kHeadDim, variant()>;
    if constexpr (backward_dkdv_tile(sizeof(Element), kHeadDim, variant()).both) {
      return launch_dkdv<BackwardDkdvKernel<Traits, KeyGradient::kBoth>>(p, stream);
    } else {
      cudaError_t error = cudaSuccess;
      if (p.dv.data) error = launch_dkdv<BackwardDkdvKernel<Traits, KeyGradient::kDv>>(p, stream);
      if (error == cudaSuccess && p.dk.data) {
        error = launch_dkdv<BackwardDkdvKernel<Traits, KeyGradient::kDk>>(p, stream);
      }
      return error;
    }
  });
}

template <class Element, int kHeadDim>
cudaError_t backward_dq(const attention::BackwardParams& p, cudaStream_t stream) {
  return with_dq_variant<Element, kHeadDim>(p, [&](auto variant) {
    using Kernel = BackwardDqKernel<KernelTraits<Element, kHeadDim, variant()>>;
    const int64_t slices = num_slices(p.head_dim_qk, Kernel::kTile.columns);
    const Schedule schedule =
        make_schedule(p, {p.first_pair, p.num_pairs}, Rows::kQueries, Kernel::kTile.queries, slices, sizeof(Element));
    return launch<Kernel>(backward_dq_kernel<Kernel>, p, schedule, stream);
  });
}

template <class Element>
cudaError_t backward_dbias(const attention::BackwardParams& p, cudaStream_t stream) {
  return with_head_dim<sizeof(Element)>(std::max(p.head_dim_qk, p.head_dim_v), [&](auto head_dim) {
    using Kernel = BackwardDbiasKernel<Element, head_dim()>;
    const int64_t blocks =
        Kernel::batches(p).count() * Kernel::heads(p).count() * Kernel::queries(p).count() * Kernel::keys(p).count();
    return launch<Kernel>(backward_dbias_kernel<Kernel>, p, blocks, stream);
  });
}

template <class Element>
cudaError_t backward_dalibi(const attention::BackwardParams& p, cudaStream_t stream) {
  return with_head_dim<sizeof(Element)>(std::max(p.head_dim_qk, p.head_dim_v), [&](auto head_dim) {
    using Kernel = BackwardDalibiKernel<Element, head_dim()>;
    return launch<Kernel>(backward_dalibi_kernel<Kernel>, p, p.batch * p.num_heads_q * p.alibi_partials_per_head,
                          stream);
  });
}

template <class Element>
cudaError_t backward_delta(const attention::BackwardParams& p, cudaStream_t stream) {
  return with_head_dim<sizeof(Element)>(std::max(p.head_dim_qk, p.head_dim_v), [&](auto head_dim) {
    using Kernel = BackwardDeltaKernel<Element, head_dim()>;
    const int64_t tiles = num_tiles(p.sequences.max_seqlen_q, Kernel::kTile.queries);
    return launch<Kernel>(backward_delta_kernel<Kernel>, p, p.batch * p.num_heads_q * tiles, stream);
  });
}

}  // namespace flash_attn_ext::sm80
