// Attention of float64 on a GPU: every feature and every head dim, in linear memory, with one simple kernel per result
// (attention_rows.cuh). A launch has all batch entries and heads.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"
#include "kernels/common/sums/sums.h"

namespace flash_attn_ext::common {

cudaError_t launch_forward_float64(const attention::ForwardParams& params, cudaStream_t stream);
cudaError_t launch_dkdv_float64(const attention::BackwardParams& params, cudaStream_t stream);
cudaError_t launch_dq_float64(const attention::BackwardParams& params, cudaStream_t stream);
cudaError_t launch_dbias_float64(const attention::BackwardParams& params, cudaStream_t stream);

cudaError_t launch_relative_dbias_float64(const attention::BackwardParams& params, cudaStream_t stream);

// One partial sum per query: partials.per_head is max_seqlen_q.
cudaError_t launch_dalibi_partials_float64(const attention::BackwardParams& params, const AlibiPartials& partials,
                                           cudaStream_t stream);

}  // namespace flash_attn_ext::common
