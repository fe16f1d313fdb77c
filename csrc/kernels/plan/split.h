// Calls whose keys are divided among blocks.
#pragma once

#include "kernels/plan/plan.h"

namespace flash_attn_ext::plan {

// Few rows that see many keys, so that reading these bounds the call; or keys from a cache, which only that kernel
// reads.
bool is_bound_by_keys(const attention::ForwardParams& params);

// The rows of a head leave multiprocessors without work, and there are keys to share out. tile_queries: of the kernel
// that would run instead.
bool leaves_multiprocessors_idle(const attention::ForwardParams& params, int tile_queries, const Limits& limits);

// Among how many blocks the keys of such a call's tiles of queries are to be divided. blocks: that it has without.
int64_t key_parts(const attention::ForwardParams& params, int64_t blocks, const Limits& limits);

ForwardPlan plan_split_forward(const attention::ForwardParams& params, const Limits& limits);

}  // namespace flash_attn_ext::plan
