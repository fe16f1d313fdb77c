// The stages of one element type: bfloat16, float16, float32, or float32 whose products are rounded to TF32. Each is
// instantiated in files of its own; the large kernels, for each head-dim bucket, so that no file takes long to compile.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"

namespace flash_attn_ext::sm80 {

template <class Element, int kHeadDim>
cudaError_t forward(const attention::ForwardParams& params, cudaStream_t stream);
// Heads that takes_heads_kernel accepts. 16-bit elements only.
template <class Element>
cudaError_t forward_heads(const attention::ForwardParams& params, cudaStream_t stream);
template <class Element, int kHeadDim>
cudaError_t backward_dkdv(const attention::BackwardParams& params, cudaStream_t stream);
template <class Element, int kHeadDim>
cudaError_t backward_dq(const attention::BackwardParams& params, cudaStream_t stream);
// dQ, dK and dV of sequences that takes_short_kernel accepts. 16-bit elements only.
template <class Element>
cudaError_t backward_short(const attention::BackwardParams& params, cudaStream_t stream);
template <class Element>
cudaError_t backward_dbias(const attention::BackwardParams& params, cudaStream_t stream);
template <class Element>
cudaError_t backward_dalibi(const attention::BackwardParams& params, cudaStream_t stream);
template <class Element>
cudaError_t backward_delta(const attention::BackwardParams& params, cudaStream_t stream);

// From params.spill: dQ = scale * dS K; dV = P^T dO; dK = scale * dS^T Q; a full bias's dS. 16-bit elements; float32
// has the first.
template <class Element>
cudaError_t dq_from_spill(const attention::BackwardParams& params, cudaStream_t stream);
template <class Element>
cudaError_t dv_from_spill(const attention::BackwardParams& params, cudaStream_t stream);
template <class Element>
cudaError_t dk_from_spill(const attention::BackwardParams& params, cudaStream_t stream);
template <class Element>
cudaError_t dbias_from_spill(const attention::BackwardParams& params, cudaStream_t stream);

}  // namespace flash_attn_ext::sm80
