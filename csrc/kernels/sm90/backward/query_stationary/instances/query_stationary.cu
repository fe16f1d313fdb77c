#include "kernels/sm90/backward/query_stationary/launch.cuh"

namespace flash_attn_ext::sm90 {

template cudaError_t backward_query_stationary<__nv_bfloat16>(const attention::BackwardParams&,
                                                              const plan::BackwardPlan&, void*, cudaStream_t);

#if !FLASH_ATTN_EXT_FAST_BUILD
template cudaError_t backward_query_stationary<__half>(const attention::BackwardParams&, const plan::BackwardPlan&,
                                                       void*, cudaStream_t);
#endif

}  // namespace flash_attn_ext::sm90
