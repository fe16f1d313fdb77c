// The gradient of a bias that is broadcast along keys: sums of one number per row (attention/dscore_row_sums.h).
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"

namespace flash_attn_ext::common {

// params.delta is rowsum(dout * out); the kernel also subtracts dlse from it. Every element of params.dbias is written.
cudaError_t launch_dbias_from_rows(const attention::BackwardParams& params, cudaStream_t stream);

}  // namespace flash_attn_ext::common
