// Which of 32 keys a mask leaves, where it hides the same keys from all queries of a sequence.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "kernels/schedule/head_tiles.h"
#include "tile/accumulator.h"

namespace flash_attn_ext {

// The mask's byte for key first_key + lane: not 0 if queries may attend to it, and 0 past the end. It is returned
// without a comparison, so that no thread waits for the load here.
__device__ __forceinline__ int lane_key_is_unmasked(const attention::AttentionParams& p, const HeadCoord& coord,
                                                    int64_t first_key) {
  const attention::BroadcastView& mask = p.score_mod.mask;
  const int64_t key = first_key + tile::lane();
  if (key >= coord.sequence.num_keys) return 0;
  if (!mask.present()) return 1;
  return static_cast<const uint8_t*>(mask.data)[mask.offset({coord.sequence.batch, coord.head, 0, key})];
}

// The bits of a word of 32 keys that belong to a thread's columns of a tile of scores: bit 8 j + e stands for key 8 j +
// 2 (thread of the quad) + e.
__device__ __forceinline__ uint32_t own_columns(uint32_t word) { return word >> (2 * (tile::lane() % 4)); }
__device__ __forceinline__ bool column_is_unmasked(uint32_t own, int j, int e) { return (own >> (8 * j + e) & 1) != 0; }

}  // namespace flash_attn_ext
