#include "kernels/sm80/backward/launch.cuh"

namespace flash_attn_ext::sm80 {

template cudaError_t backward_dkdv<float, 64>(const BackwardParams&, const BackwardPlan&, cudaStream_t);
template cudaError_t backward_dkdv<float, 128>(const BackwardParams&, const BackwardPlan&, cudaStream_t);
template cudaError_t backward_dkdv<float, 256>(const BackwardParams&, const BackwardPlan&, cudaStream_t);
template cudaError_t backward_dkdv<tile::Tf32, 64>(const BackwardParams&, const BackwardPlan&, cudaStream_t);
template cudaError_t backward_dkdv<tile::Tf32, 128>(const BackwardParams&, const BackwardPlan&, cudaStream_t);

}  // namespace flash_attn_ext::sm80
