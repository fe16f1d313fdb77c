#include "kernels/sm80/tangents/tangents.cuh"

namespace flash_attn_ext::sm80 {

template cudaError_t tangents<__nv_bfloat16, 192>(const TangentParams&, const TangentPlan&, cudaStream_t);
template cudaError_t tangents<__nv_bfloat16, 256>(const TangentParams&, const TangentPlan&, cudaStream_t);

}  // namespace flash_attn_ext::sm80
