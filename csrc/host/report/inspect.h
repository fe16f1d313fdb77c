// What users and tests may look at: visible intervals and dropout bits.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "attention/visibility.h"

namespace flash_attn_ext::host {

struct Lengths {
  int64_t seqlen_q;
  int64_t seqlen_k;
};

// (Sq, 2) int64: the keys [begin, end) that each query sees; (Sk, 2): the queries that see each key.
at::Tensor visible_keys(const Lengths& lengths, const attention::Visibility& visibility);
at::Tensor visible_queries(const Lengths& lengths, const attention::Visibility& visibility);

// (batch, heads, Sq, Sk) bool, on the CPU: True where dropout keeps a weight. Every backend draws these bits.
struct DropoutShape {
  int64_t batch;
  int64_t num_heads;
  int64_t seqlen_q;
  int64_t seqlen_k;
};
at::Tensor dropout_mask(const at::Tensor& rng_seed, double dropout_p, const DropoutShape& shape);

}  // namespace flash_attn_ext::host
