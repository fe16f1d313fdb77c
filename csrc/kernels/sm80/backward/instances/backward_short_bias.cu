#include "kernels/sm80/backward/backward_short_bias.cuh"

namespace flash_attn_ext::sm80 {

template cudaError_t backward_short_bias<__nv_bfloat16>(const BackwardParams&, cudaStream_t);

#if !FLASH_ATTN_EXT_FAST_BUILD
template cudaError_t backward_short_bias<__half>(const BackwardParams&, cudaStream_t);
#endif

}  // namespace flash_attn_ext::sm80
