#pragma once

#include "kernels/sm80/backward/backward_dbias_from_stored.cuh"
#include "kernels/sm80/backward/backward_product.cuh"
#include "kernels/sm80/sm80_kernels.h"

namespace flash_attn_ext::sm80 {

template <class Element>
cudaError_t dq_from_stored(const BackwardParams& p, const BackwardPlan& plan, cudaStream_t stream) {
  const ProductOperands operands = {.left = p.stored.ds,
                                    .right = p.k,
                                    .out = p.dq,
                                    .columns = p.head_dim_qk,
                                    .factor = static_cast<float>(p.score_mod.scale)};
  return backward_product<Element, Rows::kQueries>({p, operands}, plan, stream);
}

template <class Element>
cudaError_t dv_from_stored(const BackwardParams& p, const BackwardPlan& plan, cudaStream_t stream) {
  const ProductOperands operands = {
      .left = p.stored.p, .right = p.dout, .out = p.dv, .columns = p.head_dim_v, .factor = 1.0f};
  return backward_product<Element, Rows::kKeys>({p, operands}, plan, stream);
}

template <class Element>
cudaError_t dk_from_stored(const BackwardParams& p, const BackwardPlan& plan, cudaStream_t stream) {
  const ProductOperands operands = {.left = p.stored.ds,
                                    .right = p.q,
                                    .out = p.dk,
                                    .columns = p.head_dim_qk,
                                    .factor = static_cast<float>(p.score_mod.scale)};
  return backward_product<Element, Rows::kKeys>({p, operands}, plan, stream);
}

template <class Element>
cudaError_t dbias_from_stored(const BackwardParams& p, const BackwardPlan& plan, cudaStream_t stream) {
  // P is kept only where rows are queries.
  return p.stored.p == nullptr ? launch_dbias_from_stored<Element, Rows::kKeys>(p, stream)
                               : launch_dbias_from_stored<Element, Rows::kQueries>(p, stream);
}

}  // namespace flash_attn_ext::sm80
