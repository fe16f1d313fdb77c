// Sets the non-finite flags of kernels whose CTAs are in another order than the flags are.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "kernels/schedule/head_tiles.h"
#include "tile/accumulator.h"

namespace flash_attn_ext::sm80 {

// The flag of the calling warp. Flags are in the order of heads (common/repair/repair.h), one for each warp of a
// sequence's tile.
template <int kWarps>
__device__ __forceinline__ uint8_t& flag_in_order_of_heads(uint8_t* flags, const attention::AttentionParams& p,
                                                           const HeadCoord& coord) {
  const int64_t group = p.queries_per_key_head();
  const int64_t head = (coord.key_head * p.batch + coord.sequence.batch) * group + coord.head - coord.key_head * group;
  return flags[head * kWarps + tile::warp()];
}

// Sets the warp's flag to whether one of its threads has found a NaN, and returns that.
template <int kWarps>
__device__ __forceinline__ bool flag_nan_in_order_of_heads(uint8_t* flags, const attention::AttentionParams& p,
                                                           const HeadCoord& coord, bool found) {
  const bool any = __any_sync(0xFFFFFFFFu, found);
  if (tile::lane() == 0) flag_in_order_of_heads<kWarps>(flags, p, coord) = any;
  return any;
}

}  // namespace flash_attn_ext::sm80
