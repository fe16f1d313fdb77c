// Biases that are broadcast along queries: masks that hide the same keys from all queries of a head, as such a bias of
// 0 and -inf, copies in float32, and the largest biases, which kernels subtract.
#pragma once

#include <cmath>

#include "attention/division.h"
#include "attention/params.h"
#include "attention/sequence.h"

namespace flash_attn_ext::attention {

// Beyond this magnitude a float32 sum of q.k and a bias is too coarse, so rows with such a maximum are recomputed.
// Every finite number of float16 is nearer to 0.
inline constexpr float kMostScore = 0x1p17f;

// A bias from this magnitude on dominates q.k: no sum of the two differs from it, unless q.k is larger than 2^75. Where
// all keys that a row sees have the same one, as padding has the smallest finite number, the row weighs them equally.
inline constexpr float kLeastDominant = 0x1p100f;

// Kernels that divide a bias by the scale need at least this scale. The parts of augmented columns are then finite for
// every finite number of float16.
inline constexpr double kLeastKeyBiasScale = 0x1p-10;

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

// A copy of a key bias in float32, broadcast over the same batch entries and heads, whose keys follow each other.
struct Float32KeyBias {
  int64_t batch;
  int64_t heads;
  int64_t keys;

  FLASH_HOST_DEVICE static Float32KeyBias of(const AttentionParams& p) {
    const BroadcastView& bias = p.score_mod.bias;
    return {.batch = bias.batch_stride != 0 ? p.batch : 1,
            .heads = bias.head_stride != 0 ? p.num_heads_q : 1,
            .keys = p.sequences.max_seqlen_k};
  }

  FLASH_HOST_DEVICE int64_t rows() const { return batch * heads; }
  FLASH_HOST_DEVICE int64_t bytes() const { return rows() * keys * int64_t{sizeof(float)}; }

  FLASH_HOST_DEVICE BroadcastView view(const void* data) const {
    return {.data = data,
            .element = ElementType::kFloat32,
            .batch_stride = batch > 1 ? heads * keys : 0,
            .head_stride = heads > 1 ? keys : 0,
            .query_stride = 0,
            .key_stride = 1};
  }
};

// What is subtracted from the biases and LSEs of queries, of which `largest` is the largest bias that they see: nothing
// if that is not finite, or dominant. Nothing either if it is 16-bit and beyond kMostScore: most backward kernels
// compute float32 sums of q.k and such a bias, and their gradients must be those of the same weights. Beside a sink
// that is farther above all biases than kMostBelowSink, keys have no weight, and the difference to the sink must be
// exact.
inline constexpr float kMostBelowSink = 256.0f;
FLASH_HOST_DEVICE float subtracted_key_bias(const AttentionParams& p, int64_t head, float largest) {
  const float most = p.score_mod.bias.element == ElementType::kFloat32 ? kLeastDominant : kMostScore;
  if (!(fabsf(largest) < most)) return 0.0f;
  const bool sink_is_above = p.sink != nullptr && static_cast<const float*>(p.sink)[head] > largest + kMostBelowSink;
  return sink_is_above ? 0.0f : largest;
}

// For each kKeys keys of a row of a key bias, the largest bias of these keys, or of all keys up to the last of them.
// The sum of q.k and a large number would be inexact. So kernels subtract the largest bias of the keys that a tile of
// queries sees, or one of a few keys more, from their biases and LSEs.
//
// The forward pass takes the maximum over the keys of a work tile. The backward pass looks up running maxima, of
// kQueries queries at a time: those up to the last key that any of them sees. A query whose LSE is farther than
// kMostDistance from that maximum sees nothing but lower biases, for which the difference is inexact itself. Its
// gradients are computed again without tensor cores, and nothing is subtracted.
struct KeyBiasMaxima {
  static constexpr int kKeys = 128;
  static constexpr int kQueries = 128;
  static constexpr float kMostDistance = 0x1p13f;

  const float* data = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;

  FLASH_HOST_DEVICE static int64_t of_row(int64_t keys) { return ceil_div(keys, kKeys); }
  FLASH_HOST_DEVICE static int64_t bytes(const Float32KeyBias& bias) {
    return bias.rows() * of_row(bias.keys) * int64_t{sizeof(float)};
  }
  FLASH_HOST_DEVICE static KeyBiasMaxima in(const float* data, const Float32KeyBias& bias) {
    const int64_t of_row = KeyBiasMaxima::of_row(bias.keys);
    return {data, bias.batch > 1 ? bias.heads * of_row : 0, bias.heads > 1 ? of_row : 0};
  }
  FLASH_HOST_DEVICE bool present() const { return data != nullptr; }
  FLASH_HOST_DEVICE const float* row(int64_t batch, int64_t head) const {
    return data + batch * batch_stride + head * head_stride;
  }
  // The end of the keys of which the backward pass subtracts the maximum for a query.
  FLASH_HOST_DEVICE static int end_of(const AttentionParams& p, const Sequence& sequence, int query) {
    const int next = (query / kQueries + 1) * kQueries;
    const int last = (next < sequence.num_queries ? next : static_cast<int>(sequence.num_queries)) - 1;
    return static_cast<int>(ceil_div(p.visibility.keys_of<int>(last, sequence).end, kKeys)) * kKeys;
  }
  // Of running maxima, the one that is subtracted for a query.
  FLASH_HOST_DEVICE float of(const AttentionParams& p, const Sequence& sequence, int64_t head, int query) const {
    const int end = end_of(p, sequence, query);
    return end == 0 ? 0.0f : subtracted_key_bias(p, head, row(sequence.batch, head)[end / kKeys - 1]);
  }
};

// Whether kernels that read a key bias in float32 read it where it is.
FLASH_HOST_DEVICE bool is_float32_key_bias(const BroadcastView& bias) {
  return bias.is_of_keys() && bias.element == ElementType::kFloat32 && bias.key_stride == 1;
}

}  // namespace flash_attn_ext::attention
