// Forward mode and double backward on a GPU for tiles of scores that are only scaled, and masked only by causality and
// windows: the elementwise work of flash_attn_ext/derivatives/ on each tile, between its matrix products.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/derivatives/plain_tile.h"

namespace flash_attn_ext::derivatives {

// Each function launches one kernel. Masked elements are written as 0, whatever is read there.
cudaError_t plain_weights(const PlainTile& tile, const PlainWeights& results, cudaStream_t stream);
cudaError_t plain_gradients(const PlainTile& tile, const PlainGradients& gradients, cudaStream_t stream);

}  // namespace flash_attn_ext::derivatives
