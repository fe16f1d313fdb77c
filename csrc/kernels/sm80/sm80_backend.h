// The portable CUDA backend (compute capability 8.0 and later): mma.sync and cp.async. Each pass launches the kernels
// that its plan names on a stream of the current device.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/append.h"
#include "kernels/plan/plan.h"

namespace flash_attn_ext::sm80 {

// workspace: plan.workspace.bytes of device memory.
cudaError_t run_forward(const attention::AppendingForwardParams& params, const plan::ForwardPlan& plan, void* workspace,
                        cudaStream_t stream);
cudaError_t run_backward(const attention::BackwardParams& params, const plan::BackwardPlan& plan, void* workspace,
                         cudaStream_t stream);
// The gradients that sum dS, which is recomputed beside the kernels of dQ, dK and dV: that of ALiBi slopes, and dBias
// of a plan of any GPU backend whose source is kRecomputed, kOverBatch, kRelative or kRelativeOverBatch. Delta must be
// there, and may be overwritten. Tiles of masks need not have been scanned.
cudaError_t run_separate_sums(const attention::BackwardParams& params, const plan::BackwardPlan& plan, void* workspace,
                              cudaStream_t stream);
// Forward mode, if the plan has a kernel for it.
cudaError_t run_tangents(const attention::TangentParams& params, const plan::TangentPlan& plan, cudaStream_t stream);

}  // namespace flash_attn_ext::sm80
