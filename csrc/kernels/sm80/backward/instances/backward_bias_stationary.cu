#include "kernels/sm80/backward/backward_bias_stationary.cuh"

namespace flash_attn_ext::sm80 {

template cudaError_t backward_bias_stationary<__nv_bfloat16>(const BackwardParams&, const BackwardPlan&, cudaStream_t);

#if !FLASH_ATTN_EXT_FAST_BUILD
template cudaError_t backward_bias_stationary<__half>(const BackwardParams&, const BackwardPlan&, cudaStream_t);
#endif

}  // namespace flash_attn_ext::sm80
