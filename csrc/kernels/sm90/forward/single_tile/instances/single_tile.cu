#include "kernels/sm90/forward/single_tile/launch.cuh"

namespace flash_attn_ext::sm90 {

template cudaError_t forward_single_tile<__nv_bfloat16>(const ForwardCall&, const plan::ForwardPlan&, void*,
                                                        cudaStream_t);

#if !FLASH_ATTN_EXT_FAST_BUILD
template cudaError_t forward_single_tile<__half>(const ForwardCall&, const plan::ForwardPlan&, void*, cudaStream_t);
#endif

}  // namespace flash_attn_ext::sm90
