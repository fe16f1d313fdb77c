#include "kernels/sm80/forward_heads_launch.cuh"

namespace flash_attn_ext::sm80 {

template cudaError_t forward_heads<__nv_bfloat16>(const attention::ForwardParams&, cudaStream_t);

}  // namespace flash_attn_ext::sm80
