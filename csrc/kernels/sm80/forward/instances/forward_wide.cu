#include "kernels/sm80/forward/forward.cuh"

namespace flash_attn_ext::sm80 {

template cudaError_t forward<__nv_bfloat16, 192>(const ForwardParams&, const ForwardPlan&, cudaStream_t);
template cudaError_t forward<__nv_bfloat16, 256>(const ForwardParams&, const ForwardPlan&, cudaStream_t);
template cudaError_t forward<__nv_bfloat16, 512>(const ForwardParams&, const ForwardPlan&, cudaStream_t);
template cudaError_t forward<__nv_bfloat16, 576>(const ForwardParams&, const ForwardPlan&, cudaStream_t);
template cudaError_t forward<__half, 192>(const ForwardParams&, const ForwardPlan&, cudaStream_t);
template cudaError_t forward<__half, 256>(const ForwardParams&, const ForwardPlan&, cudaStream_t);
template cudaError_t forward<__half, 512>(const ForwardParams&, const ForwardPlan&, cudaStream_t);
template cudaError_t forward<__half, 576>(const ForwardParams&, const ForwardPlan&, cudaStream_t);

}  // namespace flash_attn_ext::sm80
