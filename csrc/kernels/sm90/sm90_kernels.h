// The stages of one element type, bfloat16 or float16. Instantiated in instances/, so that no file takes long to
// compile.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/plan/plan.h"
#include "kernels/sm90/forward_call.h"
#include "kernels/tile_config_sm90.h"

namespace flash_attn_ext::sm90 {

template <class Element, Variant kVariant>
cudaError_t forward(const ForwardCall& call, const plan::ForwardPlan& plan, void* workspace, cudaStream_t stream);

// The same where all keys of a sequence are one tile.
template <class Element>
cudaError_t forward_all_keys(const ForwardCall& call, const plan::ForwardPlan& plan, void* workspace,
                             cudaStream_t stream);

// delta, dQ, dK and dV.
template <class Element>
cudaError_t backward(const attention::BackwardParams& params, const plan::BackwardPlan& plan, void* workspace,
                     cudaStream_t stream);

// The same of few queries that see all of many keys.
template <class Element>
cudaError_t backward_few_queries(const attention::BackwardParams& params, const plan::BackwardPlan& plan,
                                 void* workspace, cudaStream_t stream);

// The same of kStoringHeadDims, with the gradient of a bias: dQ first, which stores P and dS.
template <class Element, HeadDims kDims, Variant kVariant>
cudaError_t backward_storing(const attention::BackwardParams& params, const plan::BackwardPlan& plan, void* workspace,
                             cudaStream_t stream);

}  // namespace flash_attn_ext::sm90
