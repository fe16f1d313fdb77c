// Sets the non-finite flags of kernels whose CTAs are in another order than the flags are.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "kernels/schedule/work_item.h"
#include "tile/accumulator.h"

namespace flash_attn_ext::sm80 {

// The flag of the calling warp. Flags are in the order of heads (common/repair/repair.h), one for each warp of a
// sequence's tile.
template <int kWarps>
__device__ __forceinline__ uint8_t& flag_in_order_of_heads(uint8_t* flags, const attention::AttentionParams& p,
                                                           const WorkItem& item) {
  const int64_t group = p.queries_per_key_head();
  const int64_t head = (item.key_head * p.batch + item.sequence.batch) * group + item.head - item.key_head * group;
  return flags[head * kWarps + tile::warp()];
}

// Sets the warp's flag to whether one of its threads has found a NaN, and returns that.
template <int kWarps>
__device__ __forceinline__ bool flag_nan_in_order_of_heads(uint8_t* flags, const attention::AttentionParams& p,
                                                           const WorkItem& item, bool found) {
  const bool any = __any_sync(0xFFFFFFFFu, found);
  if (tile::lane() == 0) flag_in_order_of_heads<kWarps>(flags, p, item) = any;
  return any;
}

}  // namespace flash_attn_ext::sm80
