#include "kernels/sm90/forward/launch.cuh"

namespace flash_attn_ext::sm90 {

template cudaError_t forward<__nv_bfloat16, Variant::kPlain>(const ForwardCall&, const plan::ForwardPlan&, void*,
                                                             cudaStream_t);

template cudaError_t forward<__nv_bfloat16, Variant::kShort>(const ForwardCall&, const plan::ForwardPlan&, void*,
                                                             cudaStream_t);

template cudaError_t forward<__nv_bfloat16, Variant::kSmall>(const ForwardCall&, const plan::ForwardPlan&, void*,
                                                             cudaStream_t);

template cudaError_t forward<__nv_bfloat16, Variant::kTall>(const ForwardCall&, const plan::ForwardPlan&, void*,
                                                            cudaStream_t);

}  // namespace flash_attn_ext::sm90
