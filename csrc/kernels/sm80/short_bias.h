// The kernels of both passes for short heads with a bias (forward/forward_short_bias.cuh,
// backward/backward_short_bias.cuh).
#pragma once

#include "kernels/sm80/sm80_kernels.h"

namespace flash_attn_ext::sm80 {

template <class Element>
cudaError_t forward_short_bias(const ForwardParams& params, cudaStream_t stream);

// dQ, dK and dV.
template <class Element>
cudaError_t backward_short_bias(const BackwardParams& params, cudaStream_t stream);

}  // namespace flash_attn_ext::sm80
