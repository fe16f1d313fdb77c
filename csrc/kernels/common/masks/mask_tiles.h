// Scans a mask once, so that attention kernels skip tiles that it hides completely, and do not read it in tiles that it
// leaves completely.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/key_interval.h"
#include "attention/params.h"
#include "kernels/common/masks/block_mask.h"

namespace flash_attn_ext::common {

// Writes the flags of each tile of the mask, the intervals and the blocks to memory that the plan has reserved, and its
// address to params. Does nothing where memory is null.
cudaError_t scan_mask_tiles(attention::AttentionParams& params, uint8_t* memory, cudaStream_t stream);

// The same for intervals without a mask, where params has the address.
cudaError_t scan_interval_tiles(const attention::AttentionParams& params, cudaStream_t stream);

// The same for blocks, or blocks and intervals, without a mask.
cudaError_t make_block_tiles(const attention::AttentionParams& params, cudaStream_t stream);

// The same for a mask without intervals and blocks; also writes the mask as bits, for which the plan has memory, too.
cudaError_t pack_mask(attention::AttentionParams& params, uint8_t* tiles, void* bits, cudaStream_t stream);

// Writes the block mask of lists of blocks.
cudaError_t launch_block_mask(const BlockMaskOfLists& mask, cudaStream_t stream);

// Writes the mask as bits only, where rows have at most kShortMaskKeys keys: the words of the first group of each row.
inline constexpr int64_t kShortMaskKeys = 64;
cudaError_t pack_short_mask(attention::AttentionParams& params, void* bits, cudaStream_t stream);

// Where scan_key_mask() writes. Most masks that hide the same keys from all queries and heads are padding.
struct KeyMaskMemory {
  uint8_t* tiles;
  void* bits;                         // null: not needed
  attention::KeyInterval* intervals;  // of each row of the mask
};

// Does what scan_mask_tiles or pack_mask does, and also finds the rows of the mask that leave one interval of keys.
// With dropout the interval has to begin with the first key, since draws are numbered by keys.
cudaError_t scan_key_mask(attention::AttentionParams& params, const KeyMaskMemory& memory, cudaStream_t stream);

}  // namespace flash_attn_ext::common
