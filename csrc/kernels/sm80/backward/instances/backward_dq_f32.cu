#include "kernels/sm80/backward/launch.cuh"

namespace flash_attn_ext::sm80 {

template cudaError_t backward_dq<float, 64>(const BackwardParams&, const BackwardPlan&, cudaStream_t);
template cudaError_t backward_dq<float, 128>(const BackwardParams&, const BackwardPlan&, cudaStream_t);
template cudaError_t backward_dq<float, 256>(const BackwardParams&, const BackwardPlan&, cudaStream_t);
template cudaError_t backward_dq<tile::Tf32, 64>(const BackwardParams&, const BackwardPlan&, cudaStream_t);
template cudaError_t backward_dq<tile::Tf32, 128>(const BackwardParams&, const BackwardPlan&, cudaStream_t);

}  // namespace flash_attn_ext::sm80
