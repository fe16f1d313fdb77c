#include "kernels/sm80/backward_launch.cuh"

namespace flash_attn_ext::sm80 {

template cudaError_t backward_dalibi<float>(const attention::BackwardParams&, cudaStream_t);
template cudaError_t backward_delta<float>(const attention::BackwardParams&, cudaStream_t);

}  // namespace flash_attn_ext::sm80
