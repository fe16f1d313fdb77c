// Writes new keys and values to a cache on a GPU, and rotates them and q (attention/append.h).
#pragma once

#include <cuda_runtime_api.h>

#include "attention/append.h"

namespace flash_attn_ext::common {

// Launches the kernel on the stream of the current device.
cudaError_t append_kv(const attention::AppendParams& params, cudaStream_t stream);

}  // namespace flash_attn_ext::common
