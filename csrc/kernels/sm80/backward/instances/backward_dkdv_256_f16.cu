#include "kernels/sm80/backward/launch.cuh"

namespace flash_attn_ext::sm80 {

template cudaError_t backward_dkdv<__half, 256>(const BackwardParams&, const BackwardPlan&, cudaStream_t);

}  // namespace flash_attn_ext::sm80
