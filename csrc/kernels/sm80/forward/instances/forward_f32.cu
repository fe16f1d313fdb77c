#include "kernels/sm80/forward/forward.cuh"

namespace flash_attn_ext::sm80 {

template cudaError_t forward<float, 64>(const ForwardParams&, const ForwardPlan&, cudaStream_t);
template cudaError_t forward<float, 128>(const ForwardParams&, const ForwardPlan&, cudaStream_t);
template cudaError_t forward<float, 256>(const ForwardParams&, const ForwardPlan&, cudaStream_t);
template cudaError_t forward<tile::Tf32, 64>(const ForwardParams&, const ForwardPlan&, cudaStream_t);
template cudaError_t forward<tile::Tf32, 128>(const ForwardParams&, const ForwardPlan&, cudaStream_t);

}  // namespace flash_attn_ext::sm80
