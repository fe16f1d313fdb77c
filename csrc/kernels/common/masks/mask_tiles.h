// Scans a mask once, so that attention kernels skip tiles in which nothing is attended, and do not read those in which
// everything is.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"

namespace flash_attn_ext::common {

// Notes what each tile of the mask holds in memory that the plan has for it, and in params where that is. Null: nothing
// to do.
cudaError_t scan_mask_tiles(attention::AttentionParams& params, uint8_t* memory, cudaStream_t stream);

// The same, and the mask as bits, for which the plan has memory too.
cudaError_t pack_mask(attention::AttentionParams& params, uint8_t* tiles, void* bits, cudaStream_t stream);

}  // namespace flash_attn_ext::common
