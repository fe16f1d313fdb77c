#include "kernels/sm80/backward/backward_dbias_from_stored.cuh"
#include "kernels/sm80/backward/backward_gemm.cuh"

namespace flash_attn_ext::sm80 {

template cudaError_t gradient_from_stored<__nv_bfloat16>(const BackwardParams&, const BackwardPlan&, MatrixGradient,
                                                         cudaStream_t);
template cudaError_t gradient_from_stored<__half>(const BackwardParams&, const BackwardPlan&, MatrixGradient,
                                                  cudaStream_t);
template cudaError_t gradient_from_stored<float>(const BackwardParams&, const BackwardPlan&, MatrixGradient,
                                                 cudaStream_t);
template cudaError_t dbias_from_stored<__nv_bfloat16>(const BackwardParams&, cudaStream_t);
template cudaError_t dbias_from_stored<__half>(const BackwardParams&, cudaStream_t);

}  // namespace flash_attn_ext::sm80
