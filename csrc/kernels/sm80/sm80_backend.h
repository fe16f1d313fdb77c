// The portable CUDA backend (compute capability 8.0 and later): mma.sync and cp.async. Each pass queues its kernels on
// a stream of the current device, as its plan says.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/append.h"
#include "kernels/plan/plan.h"

namespace flash_attn_ext::sm80 {

// workspace: plan.workspace.bytes of the device's memory.
cudaError_t run_forward(const attention::AppendingForwardParams& params, const plan::ForwardPlan& plan, void* workspace,
                        cudaStream_t stream);
cudaError_t run_backward(const attention::BackwardParams& params, const plan::BackwardPlan& plan, void* workspace,
                         cudaStream_t stream);
// Forward mode, where the plan has a kernel.
cudaError_t run_tangents(const attention::TangentParams& params, const plan::TangentPlan& plan, cudaStream_t stream);

}  // namespace flash_attn_ext::sm80
