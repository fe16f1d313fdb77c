#include "kernels/sm80/backward/product_launch.cuh"

namespace flash_attn_ext::sm80 {

template cudaError_t dq_from_stored<__nv_bfloat16>(const BackwardParams&, const BackwardPlan&, cudaStream_t);
template cudaError_t dv_from_stored<__nv_bfloat16>(const BackwardParams&, const BackwardPlan&, cudaStream_t);
template cudaError_t dk_from_stored<__nv_bfloat16>(const BackwardParams&, const BackwardPlan&, cudaStream_t);
template cudaError_t dbias_from_stored<__nv_bfloat16>(const BackwardParams&, const BackwardPlan&, cudaStream_t);

}  // namespace flash_attn_ext::sm80
