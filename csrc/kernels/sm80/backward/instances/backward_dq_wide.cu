#include "kernels/sm80/backward/launch.cuh"

namespace flash_attn_ext::sm80 {

template cudaError_t backward_dq<__nv_bfloat16, 192>(const BackwardParams&, const BackwardPlan&, cudaStream_t);
template cudaError_t backward_dq<__nv_bfloat16, 256>(const BackwardParams&, const BackwardPlan&, cudaStream_t);
template cudaError_t backward_dq<__nv_bfloat16, 512>(const BackwardParams&, const BackwardPlan&, cudaStream_t);
template cudaError_t backward_dq<__nv_bfloat16, 576>(const BackwardParams&, const BackwardPlan&, cudaStream_t);
template cudaError_t backward_dq<__half, 192>(const BackwardParams&, const BackwardPlan&, cudaStream_t);
template cudaError_t backward_dq<__half, 256>(const BackwardParams&, const BackwardPlan&, cudaStream_t);
template cudaError_t backward_dq<__half, 512>(const BackwardParams&, const BackwardPlan&, cudaStream_t);
template cudaError_t backward_dq<__half, 576>(const BackwardParams&, const BackwardPlan&, cudaStream_t);

}  // namespace flash_attn_ext::sm80
