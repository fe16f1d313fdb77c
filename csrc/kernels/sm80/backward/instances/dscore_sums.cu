#include "kernels/sm80/backward/dscore_sums.cuh"

namespace flash_attn_ext::sm80 {

template cudaError_t dscore_sums<__nv_bfloat16>(const BackwardParams&, const BackwardPlan&, cudaStream_t);

#if !FLASH_ATTN_EXT_FAST_BUILD
template cudaError_t dscore_sums<__half>(const BackwardParams&, const BackwardPlan&, cudaStream_t);
template cudaError_t dscore_sums<float>(const BackwardParams&, const BackwardPlan&, cudaStream_t);
#endif

}  // namespace flash_attn_ext::sm80
