// Split-KV dQ, for few queries that see many keys: CTAs share the keys of a query tile, each stores a partial dQ in
// float32, and one kernel sums these splits.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/params.h"

namespace flash_attn_ext::common {

// For each split, the sum of dS K over its keys, before the scale, laid out as dQ. Strides are in elements.
struct DqSplits {
  attention::MatrixView sums;  // float32, of split 0; columns are contiguous
  int64_t stride = 0;          // from one split to the next
  int count = 1;

  FLASH_HOST_DEVICE bool present() const { return count > 1; }
  FLASH_HOST_DEVICE float* row(int split, int64_t batch, int64_t head, int64_t row) const {
    return sums.row<float>(batch, head, row) + split * stride;
  }
};

// Launches the kernel: dq = scale * the sum of the splits. A NaN may be 0 times a NaN or infinity that the row does not
// attend to, so such rows are recomputed without tensor cores.
cudaError_t sum_dq_splits(const attention::BackwardParams& params, const DqSplits& splits, cudaStream_t stream);

}  // namespace flash_attn_ext::common
