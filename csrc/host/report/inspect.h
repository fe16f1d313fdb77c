// Visible intervals and dropout bits, which users and tests may inspect.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace flash_attn_ext::host {

// (Sq, 2) int64: the keys [begin, end) that each query sees; (Sk, 2): the queries that see each key.
at::Tensor visible_keys(int64_t seqlen_q, int64_t seqlen_k, const std::optional<std::string>& causal,
                        const std::optional<int64_t>& window_left, const std::optional<int64_t>& window_right);
at::Tensor visible_queries(int64_t seqlen_q, int64_t seqlen_k, const std::optional<std::string>& causal,
                           const std::optional<int64_t>& window_left, const std::optional<int64_t>& window_right);

// (batch, heads, Sq, Sk) bool, on the CPU: True where dropout keeps a weight. Every backend draws these bits.
struct DropoutShape {
  int64_t batch;
  int64_t num_heads;
  int64_t seqlen_q;
  int64_t seqlen_k;
};
at::Tensor dropout_mask(const at::Tensor& rng_seed, double dropout_p, const DropoutShape& shape);

}  // namespace flash_attn_ext::host
