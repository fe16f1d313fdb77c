// Which of 32 keys a mask leaves, where it hides the same keys from all queries of a sequence.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "kernels/schedule/work_item.h"
#include "tile/accumulator.h"

namespace flash_attn_ext {

// The mask's byte of the lane's key, of the group that begins at first_key: whether queries may attend to it. It is not
// compared with 0, so that nothing waits for the load. There are no keys past the end.
__device__ __forceinline__ int attends_lane_key(const attention::AttentionParams& p, const WorkItem& item,
                                                int64_t first_key) {
  const attention::BroadcastView& mask = p.score_mod.mask;
  const int64_t key = first_key + tile::lane();
  if (key >= item.sequence.num_keys) return 0;
  if (!mask.present()) return 1;
  return static_cast<const uint8_t*>(mask.data)[mask.offset({item.sequence.batch, item.head, 0, key})];
}

// The bits of a word of 32 keys that belong to a thread's columns of a tile of scores: bit 8 j + e stands for key 8 j +
// 2 (thread of the quad) + e.
__device__ __forceinline__ uint32_t own_columns(uint32_t word) { return word >> (2 * (tile::lane() % 4)); }
__device__ __forceinline__ bool attends_column(uint32_t own, int j, int e) { return (own >> (8 * j + e) & 1) != 0; }

}  // namespace flash_attn_ext
