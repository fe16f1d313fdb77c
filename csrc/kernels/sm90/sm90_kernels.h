// The passes for one element type, bfloat16 or float16. They are instantiated in instances/, so that no file takes long
// to compile.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/key_bias.h"
#include "attention/params.h"
#include "kernels/config/sm90_forward.h"
#include "kernels/plan/plan.h"
#include "kernels/schedule/key_intervals.cuh"

namespace flash_attn_ext::sm90 {

struct ForwardCall : attention::ForwardParams {
  // If present, the launch without a mask computes the batch entries that have an interval, and the other launch the
  // rest.
  KeyIntervals intervals;
  attention::KeyBiasMaxima key_bias_maxima;  // present where a kernel reads a key bias
};

// Writes the RelativeBiasBoxes of a call.
cudaError_t write_relative_bias_boxes(const attention::AttentionParams& params, void* to, cudaStream_t stream);

// The forward pass of the rows of a score mode and a kind.
template <class Element, ScoreMode kScore, RowKind kKind>
cudaError_t forward(const ForwardCall& call, const plan::ForwardPlan& plan, void* workspace, cudaStream_t stream);

// The forward pass where one tile has all keys of a sequence.
template <class Element>
cudaError_t forward_single_tile(const ForwardCall& call, const plan::ForwardPlan& plan, void* workspace,
                                cudaStream_t stream);

// The key-stationary backward pass: delta, dQ, dK and dV.
template <class Element>
cudaError_t backward_key_stationary(const attention::BackwardParams& params, const plan::BackwardPlan& plan,
                                    void* workspace, cudaStream_t stream);

// The query-stationary backward pass, for few queries of many keys.
template <class Element>
cudaError_t backward_query_stationary(const attention::BackwardParams& params, const plan::BackwardPlan& plan,
                                      void* workspace, cudaStream_t stream);

// The two-pass backward, with the gradient of a bias: dQ comes first, and materialises P and dS. kDqFromTiles: the rows
// of the table whose dQ comes from materialised tiles, which are instantiated apart from the others.
template <class Element, bool kDqFromTiles>
cudaError_t backward_two_pass(const attention::BackwardParams& params, const plan::BackwardPlan& plan, void* workspace,
                              cudaStream_t stream);

// The exact delta, or the gradient of ALiBi slopes: a partial sum for each work tile (common::launch_dalibi adds them).
template <class Element>
cudaError_t exact_delta(const attention::BackwardParams& params, const plan::BackwardPlan& plan, void* workspace,
                        cudaStream_t stream);

}  // namespace flash_attn_ext::sm90
