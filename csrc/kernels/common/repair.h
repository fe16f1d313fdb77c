// Computes rows again in which tensor cores met a NaN, without them (attention_rows.cuh): the NaN may be 0 times what
// nobody attends. A kernel reads the flags that the tensor-core kernels left, one per warp. Where none is set, which is
// nearly always, it takes as long as a launch, which begins before the kernel before has ended where the GPU can do so.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"
#include "kernels/schedule/schedule.cuh"

namespace flash_attn_ext::common {

// Which rows the warps of a launch own, and which of them met a NaN.
struct FlaggedRows {
  const uint8_t* flags = nullptr;  // one per warp: blocks of the schedule x warps
  Schedule schedule = {};          // without blocks: no rows
  int warps = 1;                   // per block
  int rows_per_warp = 0;           // neighbouring queries or keys
  int columns = 0;                 // of the result, per slice

  FLASH_HOST_DEVICE uint32_t num_flags() const { return schedule.num_blocks * static_cast<uint32_t>(warps); }
};

// Of O and the LSE.
template <class Element>
cudaError_t repair_forward(const attention::ForwardParams& params, const FlaggedRows& rows, cudaStream_t stream);
// Of dQ, and of dK and dV, in one launch.
template <class Element>
cudaError_t repair_gradients(const attention::BackwardParams& params, const FlaggedRows& queries,
                             const FlaggedRows& keys, cudaStream_t stream);

}  // namespace flash_attn_ext::common
