// Attention over a cache of keys and values, to which new ones are appended first.
#pragma once

#include "host/call/cache_inputs.h"
#include "host/call/inputs.h"

namespace flash_attn_ext::host {

// `inputs` has the caches as k and v; they are written if there are new keys. There is no backward pass, so an input
// that requires grad is an error. The LSE, absent without `wants_lse`, has no residual.
ForwardOutputs attention_with_kvcache(const AttentionInputs& inputs, const KvCacheInputs& cache, bool wants_lse);

}  // namespace flash_attn_ext::host
