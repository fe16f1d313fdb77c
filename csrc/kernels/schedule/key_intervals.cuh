// Batch entries of which a mask leaves one interval of keys. Such an entry is computed as if these were all of its
// keys, by kernels that know no mask.
#pragma once

#include "attention/key_interval.h"
#include "attention/sequence.h"
#include "tile/accumulator.h"

namespace flash_attn_ext {

// For a launch that computes the batch entries that have an interval, and one that computes the others. Each entry's
// own row of the mask decides, so that no result depends on the rest of the batch.
struct KeyIntervals {
  const attention::KeyInterval* data =
      nullptr;  // of the mask's own batch entries; null: all entries are of this launch
  int entries = 0;
  int entry_stride = 0;  // 0 where the mask is the same for all entries
  // What a query sees depends on its position, and its diagonal key is the one of the same number: queries are counted
  // from the interval's first key on, those before it by negative numbers.
  bool moves_queries = false;

  FLASH_HOST_DEVICE bool present() const { return data != nullptr; }

  // Whether some batch entry is of the launch. By all lanes of a warp.
  __device__ __forceinline__ bool any(bool with_interval) const {
    if (!present()) return true;
    bool found = false;
    for (int i = tile::lane(); i < entries; i += tile::kWarpSize) {
      found |= (__ldcg(&data[i].count) != attention::KeyInterval::kNone) == with_interval;
    }
    return __any_sync(0xFFFFFFFFu, found) != 0;
  }

  // Whether the sequence is of the launch; if so, its keys are those of its interval. first_query: of a tile.
  __device__ __forceinline__ bool take(attention::Sequence& sequence, int& first_query, bool with_interval) const {
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
