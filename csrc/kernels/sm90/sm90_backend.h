// The Hopper backend (compute capability 9.0): TMA and wgmma. It launches the kernels that a plan names on a stream of
// the current device. Calls whose plan names a kernel of sm80 run there.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/plan/plan.h"

namespace flash_attn_ext::sm90 {

// For plans with is_warp_specialised(). workspace: plan.workspace.bytes of the device's memory.
cudaError_t run_forward(const attention::ForwardParams& params, const plan::ForwardPlan& plan, void* workspace,
                        cudaStream_t stream);

// For plans with warp-specialised kernels: key-stationary, query-stationary or two-pass. They leave dSink to be
// computed from delta, and so dBias that recomputes dS.
cudaError_t run_backward(const attention::BackwardParams& params, const plan::BackwardPlan& plan, void* workspace,
                         cudaStream_t stream);

}  // namespace flash_attn_ext::sm90
