// The kernels of one element type and their arguments. The element type is bfloat16, float16, float32, or float32 whose
// products are rounded to TF32. Each function launches the kernel that the plan names. They are instantiated in
// instances/, the large kernels once per head dim, so that no file takes long to compile.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/append.h"
#include "attention/params.h"
#include "kernels/common/sums/sums.h"
#include "kernels/plan/materialised_scores.h"
#include "kernels/plan/plan.h"

namespace flash_attn_ext::sm80 {

struct ForwardParams : attention::ForwardParams {
  uint8_t* nan_flags = nullptr;  // one per warp: whether its rows have a NaN (flag_nan)
};

struct BackwardParams : attention::BackwardParams {
  bool delta_is_pending = false;  // the dQ or the fused kernel computes delta from out and dout

  // The pairs of a launch, each a batch entry and a key head. They are numbered head-major, key head * batch + batch
  // entry, so that a launch may hold all batch entries of a head.
  int64_t first_pair = 0;
  int64_t num_pairs = 0;

  MaterialisedScores materialised;
  common::DqPartials dq_partials;     // where present, the dQ kernel writes its partial dQ here
  uint8_t* dq_nan_flags = nullptr;    // one per warp of the dQ kernel: whether its rows have a NaN
  uint8_t* dkdv_nan_flags = nullptr;  // the same for the dK/dV kernel
  common::AlibiPartials alibi_partials;
  float* dbias_partials = nullptr;  // partial dBias (plan.workspace.dbias_partials)
};

using plan::BackwardPlan;
using plan::ForwardPlan;
using plan::TangentPlan;

template <class Element, int kHeadDim>
cudaError_t forward(const ForwardParams& params, const ForwardPlan& plan, cudaStream_t stream);
// 16-bit elements only.
template <class Element>
cudaError_t forward_heads(const ForwardParams& params, const ForwardPlan& plan, cudaStream_t stream);
template <class Element>
cudaError_t forward_bias_stationary(const ForwardParams& params, const ForwardPlan& plan, cudaStream_t stream);
// Short sequences whose bias has a value for each query and key.
template <class Element>
cudaError_t forward_short_bias(const ForwardParams& params, cudaStream_t stream);

// Split-KV and its combine kernel. New keys are written to the cache.
template <class Element, int kHeadDim>
cudaError_t forward_split(const attention::AppendingForwardParams& params, const ForwardPlan& plan, void* workspace,
                          cudaStream_t stream);

template <class Element, int kHeadDim>
cudaError_t backward_dkdv(const BackwardParams& params, const BackwardPlan& plan, cudaStream_t stream);
template <class Element, int kHeadDim>
cudaError_t backward_dq(const BackwardParams& params, const BackwardPlan& plan, cudaStream_t stream);
// dQ, dK and dV in one kernel. 16-bit elements only.
template <class Element>
cudaError_t backward_fused(const BackwardParams& params, const BackwardPlan& plan, cudaStream_t stream);

// The same and dBias, for short sequences whose heads each have one bias for all batch entries.
template <class Element>
cudaError_t backward_bias_stationary(const BackwardParams& params, const BackwardPlan& plan, cudaStream_t stream);
// dQ, dK and dV of such sequences.
template <class Element>
cudaError_t backward_short_bias(const BackwardParams& params, cudaStream_t stream);

// Forward mode.
template <class Element, int kHeadDim>
cudaError_t tangents(const attention::TangentParams& params, const TangentPlan& plan, cudaStream_t stream);

// rowsum(P dP) - dlse -> params.delta, which is delta before O is rounded to the element type: the error of a rounded O
// in delta does not cancel in sums of dS over queries. Where the slopes of ALiBi have a gradient, also dS times d score
// / d slope, a partial sum for each query tile -> params.alibi_partials.
template <class Element>
cudaError_t exact_delta(const BackwardParams& params, const BackwardPlan& plan, cudaStream_t stream);
// Sums of dS, which is computed again -> params.dbias.
template <class Element>
cudaError_t dscore_sums(const BackwardParams& params, const BackwardPlan& plan, cudaStream_t stream);

// The gradient of a bias that all batch entries share. 16-bit elements only.
cudaError_t run_dbias_over_batch(const BackwardParams& params, const BackwardPlan& plan, cudaStream_t stream);
// The gradient of a relative-position bias, of which there are scores.
cudaError_t run_relative_dbias(const BackwardParams& params, const BackwardPlan& plan, cudaStream_t stream);
// The same with the tiles of dbias_over_batch.cuh. 16-bit elements only.
cudaError_t run_relative_dbias_over_batch(const BackwardParams& params, const BackwardPlan& plan, cudaStream_t stream);

// From params.materialised: dQ = scale * dS K, dV = P^T dO, dK = scale * dS^T Q. 16-bit elements; float32 has dQ only.
enum class MatrixGradient { kDq, kDk, kDv };
template <class Element>
cudaError_t gradient_from_materialised(const BackwardParams& params, const BackwardPlan& plan, MatrixGradient gradient,
                                       cudaStream_t stream);
// The gradient of a bias that has its own value for each query and key. 16-bit elements only.
template <class Element>
cudaError_t dbias_from_materialised(const BackwardParams& params, cudaStream_t stream);

}  // namespace flash_attn_ext::sm80
