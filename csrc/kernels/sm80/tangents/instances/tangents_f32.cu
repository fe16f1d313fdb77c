#include "kernels/sm80/tangents/tangents.cuh"

namespace flash_attn_ext::sm80 {

template cudaError_t tangents<float, 64>(const TangentParams&, const TangentPlan&, cudaStream_t);
template cudaError_t tangents<float, 128>(const TangentParams&, const TangentPlan&, cudaStream_t);

}  // namespace flash_attn_ext::sm80
