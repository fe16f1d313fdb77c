// Computes rows again in which tensor cores met a NaN, without them (attention_rows.cuh): the NaN may be 0 times what
// nobody attends. One kernel per result reads the flags that the tensor-core kernel left, one per warp. Where none is
// set, which is nearly always, it takes as long as a launch.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"
#include "kernels/schedule/schedule.cuh"

namespace flash_attn_ext::common {

// Which rows the warps of a launch own, and which of them met a NaN.
struct FlaggedRows {
  const uint8_t* flags;  // one per warp: blocks of the schedule x warps
  Schedule schedule;
  int warps;          // per block
  int rows_per_warp;  // neighbouring queries or keys
  int columns;        // of the result, per slice
};

// Of O and the LSE; dQ; dK and dV.
template <class Element>
cudaError_t repair_forward(const attention::ForwardParams& params, const FlaggedRows& rows, cudaStream_t stream);
template <class Element>
cudaError_t repair_dq(const attention::BackwardParams& params, const FlaggedRows& rows, cudaStream_t stream);
template <class Element>
cudaError_t repair_dkdv(const attention::BackwardParams& params, const FlaggedRows& rows, cudaStream_t stream);

}  // namespace flash_attn_ext::common
