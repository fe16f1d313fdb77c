// Copies a bias for kernels that read its rows in chunks of 16 bytes.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"

namespace flash_attn_ext::common {

// Writes attention::AlignedBias of a call with a 16-bit bias.
cudaError_t write_aligned_bias(const attention::AttentionParams& params, void* to, cudaStream_t stream);

}  // namespace flash_attn_ext::common
