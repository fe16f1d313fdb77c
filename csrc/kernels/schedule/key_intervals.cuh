// Batch entries for which a mask leaves one interval of keys, as padding at either end does. A kernel without a mask
// computes such an entry, as if the interval were all of its keys.
#pragma once

#include "attention/key_interval.h"
#include "attention/sequence.h"
#include "tile/accumulator.h"

namespace flash_attn_ext {

// A call with such a mask has two launches: one computes the batch entries that have an interval, the other one the
// rest. Each entry's own row of the mask decides, so no result depends on the rest of the batch.
struct KeyIntervals {
  const attention::KeyInterval* data =
      nullptr;  // of each batch entry of the mask; null: the launch computes all batch entries
  int entries = 0;
  int entry_stride = 0;  // 0 where all batch entries share one row of the mask
  // What a query sees depends on its position under causality or a window, and so does ALiBi. There a query's diagonal
  // key has its index. So queries are counted from the interval's first key on, and those before it have negative
  // indices.
  bool moves_queries = false;

  FLASH_HOST_DEVICE bool present() const { return data != nullptr; }

  // Whether the launch computes any batch entry. All lanes of a warp call it.
  __device__ __forceinline__ bool any(bool with_interval) const {
    if (!present()) return true;
    bool found = false;
    for (int i = tile::lane(); i < entries; i += tile::kWarpSize) {
      found |= (__ldcg(&data[i].count) != attention::KeyInterval::kNone) == with_interval;
    }
    return __any_sync(0xFFFFFFFFu, found) != 0;
  }

  // Whether the launch computes the sequence. If so, it narrows the sequence to its interval, and moves first_query,
  // the first one of a tile, along with it.
  __device__ __forceinline__ bool narrow(attention::Sequence& sequence, int& first_query, bool with_interval) const {
    if (!present()) return true;
    const attention::KeyInterval kept = data[static_cast<int>(sequence.batch) * entry_stride];
    if (kept.exists() != with_interval) return false;
    if (with_interval) {
      sequence.key_begin = kept.begin;
      sequence.num_keys = kept.count;
      if (moves_queries) {
        first_query -= kept.begin;
        sequence.query_begin = kept.begin;
        sequence.num_queries -= kept.begin;
      }
    }
    return true;
  }
};

}  // namespace flash_attn_ext
