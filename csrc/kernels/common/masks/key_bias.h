// Biases that are broadcast along queries, and contiguous along keys.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/key_interval.h"
#include "attention/params.h"

namespace flash_attn_ext::common {

// Finds the batch entries to which a 16-bit bias leaves one interval of keys. Zeroes lse_residual, if it is present.
cudaError_t scan_key_bias(const attention::BasicForwardParams& params, attention::KeyInterval* intervals,
                          cudaStream_t stream);

// Counts the keys of each batch entry up to the last one that a 16-bit bias, the same for all heads, does not hide by
// -inf. Zeroes dK and dV of those behind it, if they are wanted.
cudaError_t count_keys_before_padding(const attention::BackwardParams& params, int32_t* counts, cudaStream_t stream);

// Writes the attention::KeyBiasMaxima of a bias.
cudaError_t write_key_bias_maxima(const attention::AttentionParams& params, bool running, float* to,
                                  cudaStream_t stream);

// Copies a 16-bit bias (attention::Float32KeyBias).
cudaError_t copy_key_bias(const attention::AttentionParams& params, float* to, cudaStream_t stream);

// Writes a mask of keys as such a bias, of 0 and -inf (attention::key_bias_of_mask).
cudaError_t write_mask_as_bias(const attention::AttentionParams& params, void* to, cudaStream_t stream);

}  // namespace flash_attn_ext::common
