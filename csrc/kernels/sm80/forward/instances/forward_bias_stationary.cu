#include "kernels/sm80/forward/forward_bias_stationary.cuh"

namespace flash_attn_ext::sm80 {

template cudaError_t forward_bias_stationary<__nv_bfloat16>(const ForwardParams&, const ForwardPlan&, cudaStream_t);
template cudaError_t forward_bias_stationary<__half>(const ForwardParams&, const ForwardPlan&, cudaStream_t);

}  // namespace flash_attn_ext::sm80
