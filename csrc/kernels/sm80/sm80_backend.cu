#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <initializer_list>

#include "kernels/common/score_gradients.h"
#include "kernels/sm80/sm80_backend.h"
#include "kernels/sm80/sm80_kernels.h"

namespace flash_attn_ext::sm80 {
namespace {

template <class Function>
cudaError_t with_element(attention::ElementType element, Function&& function) {
  if (element == attention::ElementType::kBFloat16) return function(__nv_bfloat16{});
  if (element == attention::ElementType::kFloat16) return function(__half{});
  return cudaErrorInvalidValue;  // the backend refuses other types
}

}  // namespace

cudaError_t run_forward(const attention::ForwardParams& params, cudaStream_t stream) {
  return with_element(params.element, [&](auto element) { return forward<decltype(element)>(params, stream); });
}

cudaError_t run_backward(const attention::BackwardParams& p, cudaStream_t stream) {
  return with_element(p.element, [&](auto element) {
    using Element = decltype(element);
    cudaError_t error = cudaSuccess;
    if (p.dk.data || p.dv.data) error = backward_dkdv<Element>(p, stream);
    if (error == cudaSuccess && p.dq.data) error = backward_dq<Element>(p, stream);
    if (error == cudaSuccess && p.dbias.present()) error = backward_dbias<Element>(p, stream);
    if (error == cudaSuccess && p.dalibi_slopes) error = backward_dalibi<Element>(p, stream);
    if (error == cudaSuccess && p.dalibi_slopes) error = common::launch_dalibi(p, stream);
    if (error == cudaSuccess && p.dsink) error = common::launch_dsink(p, stream);
    return error;
  });
}

}  // namespace flash_attn_ext::sm80
