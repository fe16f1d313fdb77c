#include "kernels/sm80/backward/exact_delta.cuh"

namespace flash_attn_ext::sm80 {

template cudaError_t exact_delta<__nv_bfloat16>(const BackwardParams&, const BackwardPlan&, cudaStream_t);

#if !FLASH_ATTN_EXT_FAST_BUILD
template cudaError_t exact_delta<__half>(const BackwardParams&, const BackwardPlan&, cudaStream_t);
template cudaError_t exact_delta<float>(const BackwardParams&, const BackwardPlan&, cudaStream_t);
#endif

}  // namespace flash_attn_ext::sm80
