#include "kernels/sm80/backward_product_launch.cuh"

namespace flash_attn_ext::sm80 {

template cudaError_t dq_from_spill<__nv_bfloat16>(const attention::BackwardParams&, cudaStream_t);
template cudaError_t dv_from_spill<__nv_bfloat16>(const attention::BackwardParams&, cudaStream_t);
template cudaError_t dk_from_spill<__nv_bfloat16>(const attention::BackwardParams&, cudaStream_t);
template cudaError_t dbias_from_spill<__nv_bfloat16>(const attention::BackwardParams&, cudaStream_t);

}  // namespace flash_attn_ext::sm80
