#include "kernels/sm80/backward/backward_fused.cuh"

namespace flash_attn_ext::sm80 {

template cudaError_t backward_fused<__nv_bfloat16>(const BackwardParams&, const BackwardPlan&, cudaStream_t);
template cudaError_t backward_fused<__half>(const BackwardParams&, const BackwardPlan&, cudaStream_t);

}  // namespace flash_attn_ext::sm80
