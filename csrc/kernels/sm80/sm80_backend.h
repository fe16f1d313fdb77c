// The portable CUDA backend (compute capability 8.0 and later): mma.sync and cp.async. Every function queues its
// kernels on the stream of the current device.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"

namespace flash_attn_ext::sm80 {

int64_t max_head_dim(attention::ElementType element);

// How many partial sums of a head's ALiBi slope are kept, for BackwardParams::alibi_partials_per_head.
int64_t num_alibi_partials(const attention::AttentionParams& params);

// The memory in which the backward pass keeps scores rather than compute them again; 0: it computes them again.
int64_t spill_bytes(const attention::BackwardParams& params);

// Whether the backward pass, with spill_bytes of memory, computes delta on its way, from params.out. Else it wants it.
bool computes_delta(const attention::BackwardParams& params);

// Whether the backward pass, with spill_bytes of memory, writes each element of dBias, once, in the bias's own type.
// Else it adds to float32 (float64) that starts at zero. Of params.dbias it looks at what the bias has of its own.
bool writes_dbias_once(const attention::BackwardParams& params);

// The memory in which a call notes which tiles a mask leaves anything of; 0: it does not.
int64_t mask_tile_bytes(const attention::AttentionParams& params);

// params.score_mod.mask_tiles.data: mask_tile_bytes of memory, or null; params.spill.ds: spill_bytes of memory, or
// null.
cudaError_t run_forward(const attention::ForwardParams& params, cudaStream_t stream);
cudaError_t run_backward(const attention::BackwardParams& params, cudaStream_t stream);

}  // namespace flash_attn_ext::sm80
