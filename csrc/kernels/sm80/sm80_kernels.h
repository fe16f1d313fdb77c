// The portable CUDA backend (compute capability 8.0 and later): mma.sync and cp.async. Every function queues its
// kernels on the stream of the current device.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"

namespace flash_attn_ext::sm80 {

inline constexpr int64_t kMaxHeadDim = 256;

// Query tiles of a head, for BackwardParams::alibi_partials_per_head.
int64_t num_alibi_partials(const attention::AttentionParams& params);

template <class Element>
cudaError_t forward(const attention::ForwardParams& params, cudaStream_t stream);
template <class Element>
cudaError_t backward_dkdv(const attention::BackwardParams& params, cudaStream_t stream);
template <class Element>
cudaError_t backward_dq(const attention::BackwardParams& params, cudaStream_t stream);
template <class Element>
cudaError_t backward_dbias(const attention::BackwardParams& params, cudaStream_t stream);
template <class Element>
cudaError_t backward_dalibi(const attention::BackwardParams& params, cudaStream_t stream);

}  // namespace flash_attn_ext::sm80
