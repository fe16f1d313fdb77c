// A bias in rows that begin at multiples of 16 bytes, for kernels that read 16 bytes at a time.
#pragma once

#include "attention/division.h"
#include "attention/params.h"

namespace flash_attn_ext::attention {

// A copy of a call's 16-bit bias, broadcast over the same batch entries and heads. Its rows end in zeros.
struct AlignedBias {
  static constexpr int64_t kChunk = 8;  // elements of 16 bits in 16 bytes

  int64_t batch;
  int64_t heads;
  int64_t queries;
  int64_t row_chunks;

  FLASH_HOST_DEVICE static AlignedBias of(const AttentionParams& p) {
    const BroadcastView& bias = p.score_mod.bias;
    return {.batch = bias.batch_stride != 0 ? p.batch : 1,
            .heads = bias.head_stride != 0 ? p.num_heads_q : 1,
            .queries = p.sequences.max_seqlen_q,
            .row_chunks = ceil_div(p.sequences.max_seqlen_k, kChunk)};
  }

  FLASH_HOST_DEVICE int64_t chunks() const { return batch * heads * queries * row_chunks; }
  FLASH_HOST_DEVICE int64_t bytes() const { return chunks() * kChunk * 2; }
};

// The call with the copy, at `data`, in place of its bias.
template <class Params>
FLASH_HOST_DEVICE Params with_aligned_bias(Params p, const void* data) {
  const AlignedBias copy = AlignedBias::of(p);
  const int64_t row = copy.row_chunks * AlignedBias::kChunk;
  p.score_mod.bias = {.data = data,
                      .element = p.element,
                      .batch_stride = copy.batch > 1 ? copy.heads * copy.queries * row : 0,
                      .head_stride = copy.heads > 1 ? copy.queries * row : 0,
                      .query_stride = row,
                      .key_stride = 1};
  return p;
}

}  // namespace flash_attn_ext::attention
