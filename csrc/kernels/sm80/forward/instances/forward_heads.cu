#include "kernels/sm80/forward/forward_heads.cuh"

namespace flash_attn_ext::sm80 {

template cudaError_t forward_heads<__nv_bfloat16>(const ForwardParams&, const ForwardPlan&, cudaStream_t);

#if !FLASH_ATTN_EXT_FAST_BUILD
template cudaError_t forward_heads<__half>(const ForwardParams&, const ForwardPlan&, cudaStream_t);
#endif

}  // namespace flash_attn_ext::sm80
