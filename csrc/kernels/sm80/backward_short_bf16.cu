#include "kernels/sm80/backward_short_launch.cuh"

namespace flash_attn_ext::sm80 {

template cudaError_t backward_short<__nv_bfloat16>(const attention::BackwardParams&, cudaStream_t);

}  // namespace flash_attn_ext::sm80
