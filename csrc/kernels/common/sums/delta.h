// delta = rowsum(dout * out) - dlse on a GPU.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"

namespace flash_attn_ext::common {

// Launches the kernel on the stream of the current device.
cudaError_t launch_delta(const attention::DeltaParams& params, cudaStream_t stream);

}  // namespace flash_attn_ext::common
