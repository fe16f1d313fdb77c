#include "kernels/sm80/forward/split/launch.cuh"

namespace flash_attn_ext::sm80 {

template cudaError_t forward_split<__nv_bfloat16, 64>(const attention::AppendingForwardParams&, const ForwardPlan&,
                                                      void*, cudaStream_t);
template cudaError_t forward_split<__nv_bfloat16, 128>(const attention::AppendingForwardParams&, const ForwardPlan&,
                                                       void*, cudaStream_t);

#if !FLASH_ATTN_EXT_FAST_BUILD
template cudaError_t forward_split<__half, 64>(const attention::AppendingForwardParams&, const ForwardPlan&, void*,
                                               cudaStream_t);
template cudaError_t forward_split<__half, 128>(const attention::AppendingForwardParams&, const ForwardPlan&, void*,
                                                cudaStream_t);
#endif

}  // namespace flash_attn_ext::sm80
