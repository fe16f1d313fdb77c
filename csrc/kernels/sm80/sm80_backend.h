// The backend's two entry points, for any element type it takes.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"

namespace flash_attn_ext::sm80 {

cudaError_t run_forward(const attention::ForwardParams& params, cudaStream_t stream);
cudaError_t run_backward(const attention::BackwardParams& params, cudaStream_t stream);

}  // namespace flash_attn_ext::sm80
