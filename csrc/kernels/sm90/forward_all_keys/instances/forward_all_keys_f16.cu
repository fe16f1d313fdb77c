#include "kernels/sm90/forward_all_keys/launch.cuh"

namespace flash_attn_ext::sm90 {

template cudaError_t forward_all_keys<__half>(const ForwardCall&, const plan::ForwardPlan&, void*, cudaStream_t);

}  // namespace flash_attn_ext::sm90
