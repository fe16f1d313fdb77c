// The longest sequences of a call. The shapes of a dense batch tell them, or cu_seqlens or a bound of a packed one.
#pragma once

#include "host/call/inputs.h"

namespace flash_attn_ext::host {

struct SequenceLengths {
  int64_t queries;
  int64_t keys;
};

// The length of the longest sequence, by offsets in CPU memory.
int64_t longest_sequence(const at::Tensor& cu_seqlens);

// Upper bounds, without reading from a device: for offsets on a device, max_seqlen, or else the length of a bias or
// mask that has one, or else the number of tokens.
SequenceLengths longest_sequences(const AttentionInputs& inputs);

}  // namespace flash_attn_ext::host
