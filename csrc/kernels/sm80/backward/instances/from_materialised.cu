#include "kernels/sm80/backward/backward_dbias_from_materialised.cuh"
#include "kernels/sm80/backward/backward_gemm.cuh"

namespace flash_attn_ext::sm80 {

template cudaError_t gradient_from_materialised<__nv_bfloat16>(const BackwardParams&, const BackwardPlan&,
                                                               MatrixGradient, cudaStream_t);
template cudaError_t dbias_from_materialised<__nv_bfloat16>(const BackwardParams&, cudaStream_t);

#if !FLASH_ATTN_EXT_FAST_BUILD
template cudaError_t gradient_from_materialised<__half>(const BackwardParams&, const BackwardPlan&, MatrixGradient,
                                                        cudaStream_t);
template cudaError_t gradient_from_materialised<float>(const BackwardParams&, const BackwardPlan&, MatrixGradient,
                                                       cudaStream_t);
template cudaError_t dbias_from_materialised<__half>(const BackwardParams&, cudaStream_t);
#endif

}  // namespace flash_attn_ext::sm80
