// Attention over a cache of keys and values, which new ones are appended to first.
#pragma once

#include "host/call/cache_inputs.h"
#include "host/call/inputs.h"

namespace flash_attn_ext::host {

// `inputs` has the caches as k and v, which are written where there are new keys. No backward pass: an error where a
// gradient is asked for. The LSE, without `wants_lse` absent, has no residual.
ForwardOutputs attention_with_kvcache(const AttentionInputs& inputs, const KvCacheInputs& cache, bool wants_lse);

}  // namespace flash_attn_ext::host
