// Every requirement on a call with a cache of keys and values. The messages are like those of checks/checks.h.
#pragma once

#include "host/call/cache_inputs.h"
#include "host/call/inputs.h"

namespace flash_attn_ext::host {

// Checks shapes, dtypes, devices, memory and options; on the CPU also the values of lengths, tables and indices. On a
// GPU reading those would wait for it, so kernels clamp them instead. With FLASH_ATTN_EXT_CHECK=1 they are checked
// there too.
void check_kv_cache(const AttentionInputs& inputs, const KvCacheInputs& cache);

// Checks that lengths are within the cache and the rotary tables, that entries and pages exist, and that no sequence
// appends to one that another sequence has too. Waits for the device that the values are on.
void check_kv_cache_values(const AttentionInputs& inputs, const KvCacheInputs& cache);

}  // namespace flash_attn_ext::host
