#include "kernels/sm80/forward/forward_short_bias.cuh"

namespace flash_attn_ext::sm80 {

template cudaError_t forward_short_bias<__nv_bfloat16>(const ForwardParams&, cudaStream_t);

#if !FLASH_ATTN_EXT_FAST_BUILD
template cudaError_t forward_short_bias<__half>(const ForwardParams&, cudaStream_t);
#endif

}  // namespace flash_attn_ext::sm80
