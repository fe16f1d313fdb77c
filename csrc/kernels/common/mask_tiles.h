// Looks a mask over once, so that attention kernels skip tiles in which nothing is attended, and do not read those in
// which everything is.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"

namespace flash_attn_ext::common {

// How many tiles a mask has along each dimension; 1 where it is broadcast.
struct MaskTileCounts {
  int64_t batch;
  int64_t heads;
  int64_t queries;
  int64_t keys;
  constexpr int64_t total() const { return batch * heads * queries * keys; }
};
MaskTileCounts count_mask_tiles(const attention::AttentionParams& params);

// The table's strides, for memory of count_mask_tiles(params).total() bytes.
attention::MaskTiles mask_tiles_in(void* memory, const attention::AttentionParams& params);

// Fills params.score_mod.mask_tiles.
cudaError_t launch_mask_tiles(const attention::AttentionParams& params, cudaStream_t stream);

}  // namespace flash_attn_ext::common
