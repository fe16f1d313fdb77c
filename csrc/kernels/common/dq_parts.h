// dQ of few queries that see many keys: blocks share the keys of a tile of queries, each leaves the float32 sums of its
// part, and one kernel adds the parts up.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/params.h"

namespace flash_attn_ext::common {

// sum over a part's keys of dS K, before the scale, laid out as dQ. In elements.
struct DqParts {
  attention::MatrixView sums;  // float32, of part 0; columns are neighbours
  int64_t stride = 0;          // from part to part
  int count = 1;

  FLASH_HOST_DEVICE bool present() const { return count > 1; }
  FLASH_HOST_DEVICE float* row(int part, int64_t batch, int64_t head, int64_t row) const {
    return sums.row<float>(batch, head, row) + part * stride;
  }
};

// Queues the kernel: dq = scale * the parts' sum. Where that is NaN, which may be 0 times what nobody attends, a row is
// computed again without tensor cores.
cudaError_t sum_dq_parts(const attention::BackwardParams& params, const DqParts& parts, cudaStream_t stream);

}  // namespace flash_attn_ext::common
