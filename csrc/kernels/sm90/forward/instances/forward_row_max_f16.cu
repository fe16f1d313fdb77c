#include "kernels/sm90/forward/launch.cuh"

namespace flash_attn_ext::sm90 {

template cudaError_t forward<__half, ScoreMode::kScaleOnly, RowKind::kRowMax>(const ForwardCall&,
                                                                              const plan::ForwardPlan&, void*,
                                                                              cudaStream_t);
template cudaError_t forward<__half, ScoreMode::kMask, RowKind::kRowMax>(const ForwardCall&, const plan::ForwardPlan&,
                                                                         void*, cudaStream_t);
template cudaError_t forward<__half, ScoreMode::kKeyBias, RowKind::kRowMax>(const ForwardCall&,
                                                                            const plan::ForwardPlan&, void*,
                                                                            cudaStream_t);

}  // namespace flash_attn_ext::sm90
