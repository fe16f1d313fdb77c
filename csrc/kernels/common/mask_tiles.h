// Scans a mask once, so that attention kernels skip tiles in which nothing is attended, and do not read those in which
// everything is.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"

namespace flash_attn_ext::common {

// Fills params.score_mod.mask_tiles.
cudaError_t launch_mask_tiles(const attention::AttentionParams& params, cudaStream_t stream);

}  // namespace flash_attn_ext::common
