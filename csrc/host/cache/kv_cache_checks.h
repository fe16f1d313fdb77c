// Every requirement on a call with a cache of keys and values. Messages as in checks.h.
#pragma once

#include "host/call/cache_inputs.h"
#include "host/call/inputs.h"

namespace flash_attn_ext::host {

// Shapes, dtypes, devices, memory and options; on the CPU also what lengths, tables and indices hold. On a GPU looking
// at those would wait for it, and kernels clamp them. With FLASH_ATTN_EXT_CHECK=1 they are looked at there too.
void check_kv_cache(const AttentionInputs& inputs, const KvCacheInputs& cache);

// Lengths within the cache and the rotary tables, entries and pages that exist, and none that a sequence appends to and
// another has too. Waits for the device that the values are on.
void check_kv_cache_values(const AttentionInputs& inputs, const KvCacheInputs& cache);

}  // namespace flash_attn_ext::host
