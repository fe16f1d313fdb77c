// Split-KV: calls whose keys are split among CTAs.
#pragma once

#include "kernels/plan/plan.h"

namespace flash_attn_ext::plan {

// From how many keys on split-KV may pay, and the least keys that are worth a CTA.
inline constexpr int64_t kSplitKeys = 512;
inline constexpr int64_t kLeastKeysOfCta = 128;
// Up to this number of queries, and with any number where there is a cache, keys are split where SMs would be idle. In
// other calls a result does not depend on the rest of the batch.
inline constexpr int64_t kSplitQueries = 512;

// The queries of a portable tile, by which plans decide whether SMs would be idle without split-KV.
inline constexpr int kSplitTileQueries = 128;

// Whether few rows see so many keys that reading these bounds the call, or keys come from a cache, which of the
// portable kernels only the split-KV kernel reads.
bool is_bound_by_keys(const attention::ForwardParams& params);

// Whether the rows of all heads leave SMs without work, and there are keys to split. tile_queries: of the kernel that
// would run instead.
bool leaves_sms_idle(const attention::ForwardParams& params, int tile_queries, const Limits& limits);

// Into how many splits the keys of such a call's query tiles are divided. blocks: the CTAs without splits.
int64_t kv_splits(const attention::ForwardParams& params, int64_t blocks, const Limits& limits);

ForwardPlan plan_split_forward(const attention::ForwardParams& params, const Limits& limits);

}  // namespace flash_attn_ext::plan
