#include "kernels/sm90/forward/launch.cuh"

namespace flash_attn_ext::sm90 {

template cudaError_t forward<__half, Variant::kPlain>(const attention::ForwardParams&, const plan::ForwardPlan&, void*,
                                                      cudaStream_t);

template cudaError_t forward<__half, Variant::kShort>(const attention::ForwardParams&, const plan::ForwardPlan&, void*,
                                                      cudaStream_t);

template cudaError_t forward<__half, Variant::kSmall>(const attention::ForwardParams&, const plan::ForwardPlan&, void*,
                                                      cudaStream_t);

}  // namespace flash_attn_ext::sm90
