#include "kernels/sm80/backward/launch.cuh"

namespace flash_attn_ext::sm80 {

template cudaError_t backward_dq<__nv_bfloat16, 64>(const BackwardParams&, const BackwardPlan&, cudaStream_t);
template cudaError_t backward_dq<__nv_bfloat16, 96>(const BackwardParams&, const BackwardPlan&, cudaStream_t);
template cudaError_t backward_dq<__nv_bfloat16, 128>(const BackwardParams&, const BackwardPlan&, cudaStream_t);

#if !FLASH_ATTN_EXT_FAST_BUILD
template cudaError_t backward_dq<__half, 64>(const BackwardParams&, const BackwardPlan&, cudaStream_t);
template cudaError_t backward_dq<__half, 96>(const BackwardParams&, const BackwardPlan&, cudaStream_t);
template cudaError_t backward_dq<__half, 128>(const BackwardParams&, const BackwardPlan&, cudaStream_t);
#endif

}  // namespace flash_attn_ext::sm80
