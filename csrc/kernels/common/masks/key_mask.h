// Scans a mask that hides keys from all queries and heads alike: padding, most of the time.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"
#include "kernels/schedule/key_intervals.cuh"

namespace flash_attn_ext::common {

struct KeyMaskMemory {
  uint8_t* tiles;
  void* bits;                         // null: not wanted
  attention::KeyInterval* intervals;  // of each row of the mask
};

// As scan_mask_tiles or pack_mask, and which rows leave an interval of keys. With dropout this has to begin with the
// first key: draws are numbered by keys.
cudaError_t scan_key_mask(attention::AttentionParams& params, const KeyMaskMemory& memory, cudaStream_t stream);

}  // namespace flash_attn_ext::common
