#include "kernels/sm80/backward_launch.cuh"

namespace flash_attn_ext::sm80 {

template cudaError_t backward_dq<__nv_bfloat16, 64>(const attention::BackwardParams&, cudaStream_t);
template cudaError_t backward_dq<__nv_bfloat16, 96>(const attention::BackwardParams&, cudaStream_t);
template cudaError_t backward_dq<__nv_bfloat16, 128>(const attention::BackwardParams&, cudaStream_t);

}  // namespace flash_attn_ext::sm80
