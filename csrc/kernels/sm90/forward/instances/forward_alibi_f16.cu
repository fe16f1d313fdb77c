#include "kernels/sm90/forward/launch.cuh"

namespace flash_attn_ext::sm90 {

template cudaError_t forward<__half, ScoreMode::kAlibi, RowKind::kPlain>(const ForwardCall&, const plan::ForwardPlan&,
                                                                         void*, cudaStream_t);
template cudaError_t forward<__half, ScoreMode::kAlibiMask, RowKind::kPlain>(const ForwardCall&,
                                                                             const plan::ForwardPlan&, void*,
                                                                             cudaStream_t);

}  // namespace flash_attn_ext::sm90
