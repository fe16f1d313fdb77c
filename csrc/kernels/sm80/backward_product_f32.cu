#include "kernels/sm80/backward_product_launch.cuh"

namespace flash_attn_ext::sm80 {

template cudaError_t dq_from_spill<float>(const attention::BackwardParams&, cudaStream_t);

}  // namespace flash_attn_ext::sm80
