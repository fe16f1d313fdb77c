#include "kernels/sm90/backward/exact_delta/launch.cuh"

namespace flash_attn_ext::sm90 {

template cudaError_t exact_delta<__nv_bfloat16>(const attention::BackwardParams&, const plan::BackwardPlan&, void*,
                                                cudaStream_t);

#if !FLASH_ATTN_EXT_FAST_BUILD
template cudaError_t exact_delta<__half>(const attention::BackwardParams&, const plan::BackwardPlan&, void*,
                                         cudaStream_t);
#endif

}  // namespace flash_attn_ext::sm90
