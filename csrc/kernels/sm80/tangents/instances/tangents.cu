#include "kernels/sm80/tangents/tangents.cuh"

namespace flash_attn_ext::sm80 {

template cudaError_t tangents<__nv_bfloat16, 64>(const TangentParams&, const TangentPlan&, cudaStream_t);
template cudaError_t tangents<__nv_bfloat16, 96>(const TangentParams&, const TangentPlan&, cudaStream_t);
template cudaError_t tangents<__nv_bfloat16, 128>(const TangentParams&, const TangentPlan&, cudaStream_t);

#if !FLASH_ATTN_EXT_FAST_BUILD
template cudaError_t tangents<__nv_bfloat16, 192>(const TangentParams&, const TangentPlan&, cudaStream_t);
template cudaError_t tangents<__nv_bfloat16, 256>(const TangentParams&, const TangentPlan&, cudaStream_t);
template cudaError_t tangents<__half, 64>(const TangentParams&, const TangentPlan&, cudaStream_t);
template cudaError_t tangents<__half, 96>(const TangentParams&, const TangentPlan&, cudaStream_t);
template cudaError_t tangents<__half, 128>(const TangentParams&, const TangentPlan&, cudaStream_t);
template cudaError_t tangents<__half, 192>(const TangentParams&, const TangentPlan&, cudaStream_t);
template cudaError_t tangents<__half, 256>(const TangentParams&, const TangentPlan&, cudaStream_t);
#endif

}  // namespace flash_attn_ext::sm80
