#include "kernels/sm80/forward/split/launch.cuh"

namespace flash_attn_ext::sm80 {

template cudaError_t forward_split<__nv_bfloat16, 256>(const attention::AppendingForwardParams&, const ForwardPlan&,
                                                       void*, cudaStream_t);
template cudaError_t forward_split<__half, 256>(const attention::AppendingForwardParams&, const ForwardPlan&, void*,
                                                cudaStream_t);
template cudaError_t forward_split<__nv_bfloat16, 512>(const attention::AppendingForwardParams&, const ForwardPlan&,
                                                       void*, cudaStream_t);
template cudaError_t forward_split<__half, 512>(const attention::AppendingForwardParams&, const ForwardPlan&, void*,
                                                cudaStream_t);
template cudaError_t forward_split<__nv_bfloat16, 576>(const attention::AppendingForwardParams&, const ForwardPlan&,
                                                       void*, cudaStream_t);
template cudaError_t forward_split<__half, 576>(const attention::AppendingForwardParams&, const ForwardPlan&, void*,
                                                cudaStream_t);

}  // namespace flash_attn_ext::sm80
