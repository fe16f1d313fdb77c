// Split-KV: calls whose keys are split among CTAs.
#pragma once

#include "kernels/plan/plan.h"

namespace flash_attn_ext::plan {

// Whether few rows see so many keys that reading these bounds the call, or keys come from a cache, which only the
// split-KV kernel reads.
bool is_bound_by_keys(const attention::ForwardParams& params);

// Whether the rows of all heads leave SMs without work, and there are keys to split. tile_queries: of the kernel that
// would run instead.
bool leaves_sms_idle(const attention::ForwardParams& params, int tile_queries, const Limits& limits);

// Into how many splits the keys of such a call's query tiles are divided. blocks: the CTAs without splits.
int64_t kv_splits(const attention::ForwardParams& params, int64_t blocks, const Limits& limits);

ForwardPlan plan_split_forward(const attention::ForwardParams& params, const Limits& limits);

}  // namespace flash_attn_ext::plan
