#include "kernels/sm80/forward/forward.cuh"

namespace flash_attn_ext::sm80 {

template cudaError_t forward<__nv_bfloat16, 64>(const ForwardParams&, const ForwardPlan&, cudaStream_t);
template cudaError_t forward<__nv_bfloat16, 96>(const ForwardParams&, const ForwardPlan&, cudaStream_t);
template cudaError_t forward<__nv_bfloat16, 128>(const ForwardParams&, const ForwardPlan&, cudaStream_t);

#if !FLASH_ATTN_EXT_FAST_BUILD
template cudaError_t forward<__half, 64>(const ForwardParams&, const ForwardPlan&, cudaStream_t);
template cudaError_t forward<__half, 96>(const ForwardParams&, const ForwardPlan&, cudaStream_t);
template cudaError_t forward<__half, 128>(const ForwardParams&, const ForwardPlan&, cudaStream_t);
#endif

}  // namespace flash_attn_ext::sm80
