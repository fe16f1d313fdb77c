// Scans a mask once, so that attention kernels skip tiles that it hides completely, and do not read it in tiles that it
// leaves completely.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"

namespace flash_attn_ext::common {

// Writes the flags of each tile of the mask to memory that the plan has reserved, and its address to params. Does
// nothing where memory is null.
cudaError_t scan_mask_tiles(attention::AttentionParams& params, uint8_t* memory, cudaStream_t stream);

// The same; also writes the mask as bits, for which the plan has memory, too.
cudaError_t pack_mask(attention::AttentionParams& params, uint8_t* tiles, void* bits, cudaStream_t stream);

}  // namespace flash_attn_ext::common
