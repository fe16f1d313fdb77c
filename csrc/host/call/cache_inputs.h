// The arguments of a call with a cache of keys and values, beside its AttentionInputs. In those, k and v are the cache
// in canonical form: (B_cache, Hk, rows, D) and (B_cache, Hk, rows, Dv), or (pages, Hk, page size, D) and (pages, Hk,
// page size, Dv).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "host/call/inputs.h"

namespace flash_attn_ext::host {

struct KvCacheInputs {
  at::Tensor cache_seqlens;                   // (B,) int32: keys that were in the cache before this call
  std::optional<at::Tensor> k_new;            // (B, Hk, new, D), appended before anything is attended
  std::optional<at::Tensor> v_new;            // (B, Hk, new, Dv)
  std::optional<at::Tensor> block_table;      // (B, pages of a sequence) int32
  std::optional<at::Tensor> cache_batch_idx;  // (B,) int32
  std::optional<at::Tensor> rotary_cos;       // (positions, rotary dim / 2), q's dtype
  std::optional<at::Tensor> rotary_sin;
  bool rotary_interleaved = false;

  int64_t num_new() const { return k_new ? k_new->size(2) : 0; }
  // The most keys that a sequence can have.
  int64_t capacity(const AttentionInputs& in) const {
    return block_table ? block_table->size(1) * in.k.size(2) : in.k.size(2);
  }
};

// Whether query i is rotated by the position of new key i; otherwise all queries are rotated by that of the first one.
inline bool queries_advance(const AttentionInputs& in) { return in.causal || in.window_left || in.window_right; }

}  // namespace flash_attn_ext::host
