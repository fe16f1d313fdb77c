#include "kernels/sm80/backward/product_launch.cuh"

namespace flash_attn_ext::sm80 {

template cudaError_t dq_from_stored<float>(const BackwardParams&, const BackwardPlan&, cudaStream_t);

}  // namespace flash_attn_ext::sm80
