// Gradients of per-head score parameters on a GPU, summed in a fixed order.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"
#include "kernels/common/sums/alibi_partials.h"

namespace flash_attn_ext::common {

// dsink[head] = -sum over batch entries and queries of exp(sink - lse) * delta.
cudaError_t launch_dsink(const attention::BackwardParams& params, cudaStream_t stream);

// dalibi_slopes[batch, head] = sum of its partial sums.
cudaError_t launch_dalibi(const attention::BackwardParams& params, const AlibiPartials& partials, cudaStream_t stream);

}  // namespace flash_attn_ext::common
