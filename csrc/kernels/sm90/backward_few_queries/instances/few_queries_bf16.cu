#include "kernels/sm90/backward_few_queries/launch.cuh"

namespace flash_attn_ext::sm90 {

template cudaError_t backward_few_queries<__nv_bfloat16>(const attention::BackwardParams&, const plan::BackwardPlan&,
                                                         void*, cudaStream_t);

}  // namespace flash_attn_ext::sm90
