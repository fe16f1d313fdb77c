#include "kernels/sm90/backward/two_pass/launch.cuh"

namespace flash_attn_ext::sm90 {

template cudaError_t backward_two_pass<__nv_bfloat16, true>(const attention::BackwardParams&, const plan::BackwardPlan&,
                                                            void*, cudaStream_t);

}  // namespace flash_attn_ext::sm90
