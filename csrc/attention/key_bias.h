// Biases that are broadcast along queries, and masks that hide the same keys from all queries of a head, as such a bias
// of 0 and -inf.
#pragma once

#include "attention/params.h"

namespace flash_attn_ext::attention {

// Beyond this magnitude a float32 sum of q.k and a bias is too coarse, so rows with such a maximum are recomputed.
// Every finite number of float16 is nearer to 0.
inline constexpr float kMostScore = 0x1p17f;

// A bias from this magnitude on dominates q.k: no sum of the two differs from it, unless q.k is larger than 2^75. Where
// all keys that a row sees have the same one, as padding has the smallest finite number, the row weighs them equally.
inline constexpr float kLeastDominant = 0x1p100f;

// The bias is broadcast over the same dimensions as the mask.
FLASH_HOST_DEVICE int64_t key_bias_heads(const AttentionParams& p) {
  return p.score_mod.mask.head_stride != 0 ? p.num_heads_q : 1;
}
FLASH_HOST_DEVICE int64_t key_bias_rows(const AttentionParams& p) {
  return (p.score_mod.mask.batch_stride != 0 ? p.batch : 1) * key_bias_heads(p);
}
// With 16-bit elements.
FLASH_HOST_DEVICE int64_t key_bias_bytes(const AttentionParams& p) {
  return key_bias_rows(p) * p.sequences.max_seqlen_k * 2;
}

// The bias of a call's mask, in rows of keys at `data`.
FLASH_HOST_DEVICE BroadcastView key_bias_of_mask(const AttentionParams& p, const void* data) {
  const BroadcastView& mask = p.score_mod.mask;
  const int64_t keys = p.sequences.max_seqlen_k;
  return {.data = data,
          .element = p.element,
          .batch_stride = mask.batch_stride != 0 ? key_bias_heads(p) * keys : 0,
          .head_stride = mask.head_stride != 0 ? keys : 0,
          .query_stride = 0,
          .key_stride = 1};
}

// The call with that bias in place of its mask. Plans run before the bias has memory, and pass the mask's pointer; they
// read only whether it is null.
template <class Params>
FLASH_HOST_DEVICE Params with_mask_as_bias(Params p, const void* data) {
  const BroadcastView bias = key_bias_of_mask(p, data);
  p.score_mod.mask = {};
  p.score_mod.bias = bias;
  return p;
}

}  // namespace flash_attn_ext::attention
