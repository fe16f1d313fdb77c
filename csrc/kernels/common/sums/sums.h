// Sums over rows and over splits that no attention kernel finishes itself: delta, the gradients of what is added to
// scores, and dQ.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/params.h"
#include "kernels/common/sums/table_sums.h"

namespace flash_attn_ext::common {

// delta = rowsum(dout * out) - dlse.
cudaError_t launch_delta(const attention::DeltaParams& params, cudaStream_t stream);

// A slope's gradient is the sum of these partial sums, one per query tile, or in float64 per query: (batch,
// num_heads_q, per_head), accumulate type.
struct AlibiPartials {
  void* data = nullptr;
  int64_t per_head = 0;
};

// dsink[head] = -sum over batch entries and queries of exp(sink - lse) * delta. The kernels overwrite delta with
// partial sums, so nothing may read it afterwards.
cudaError_t launch_dsink(const attention::BackwardParams& params, cudaStream_t stream);

// dalibi_slopes[batch, head] = sum of its partial sums.
cudaError_t launch_dalibi(const attention::BackwardParams& params, const AlibiPartials& partials, cudaStream_t stream);

// The gradient of a bias that is broadcast along keys: sums of one number per row (attention/dscore_row_sums.h).
// params.delta is rowsum(dout * out); the kernel also subtracts dlse from it. Every element of params.dbias is written.
cudaError_t launch_dbias_from_rows(const attention::BackwardParams& params, cudaStream_t stream);

// Partial sums of dS over queries, of each key: (batch, rows, keys_of_row), float32. Rows are those of one head after
// the other: of query heads, if the bias is of heads, and else of key heads.
struct DscoreSumsOfKeys {
  const float* data = nullptr;
  int64_t rows = 0;
  int64_t keys_of_row = 0;
};

// The gradient of a key bias from these. A sum that is not finite may be 0 times a value that no query attends, so it
// is computed again, without tensor cores. Every element of params.dbias is written. Dense batches only.
cudaError_t launch_dbias_from_keys(const attention::BackwardParams& params, const DscoreSumsOfKeys& sums,
                                   cudaStream_t stream);

// Biases that are looked up in tables, and gradients of tables (table_sums.h).
cudaError_t launch_look_up(const TableLookUp& table, cudaStream_t stream);
cudaError_t launch_table_sums(const TableSums& table, cudaStream_t stream);

// Split-KV dQ, for few queries that see many keys: CTAs share the keys of a query tile, each stores a partial dQ in
// float32, and one kernel sums these. A partial dQ is the sum of dS K over the keys of a split, unscaled, and is laid
// out as dQ. Strides are in elements.
struct DqPartials {
  attention::MatrixView sums;  // float32, of split 0; columns are contiguous
  int64_t stride = 0;          // from one split to the next
  int count = 1;

  FLASH_HOST_DEVICE bool present() const { return count > 1; }
  FLASH_HOST_DEVICE float* row(int split, int64_t batch, int64_t head, int64_t row) const {
    return sums.row<float>(batch, head, row) + split * stride;
  }
};

// Launches the kernel: dq = scale * the sum of partial dQ. A NaN may be 0 times a NaN or infinity that the row does not
// attend to, so such rows are recomputed without tensor cores.
cudaError_t sum_dq_partials(const attention::BackwardParams& params, const DqPartials& partials, cudaStream_t stream);

}  // namespace flash_attn_ext::common
