#include "kernels/sm90/backward/slope_gradient/launch.cuh"

namespace flash_attn_ext::sm90 {

template cudaError_t slope_gradient<__nv_bfloat16>(const attention::BackwardParams&, const plan::BackwardPlan&, void*,
                                                   cudaStream_t);

#if !FLASH_ATTN_EXT_FAST_BUILD
template cudaError_t slope_gradient<__half>(const attention::BackwardParams&, const plan::BackwardPlan&, void*,
                                            cudaStream_t);
#endif

}  // namespace flash_attn_ext::sm90
