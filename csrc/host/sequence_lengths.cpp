#include "host/sequence_lengths.h"

#include <algorithm>

namespace flash_attn_ext::host {
namespace {

// A bound that the caller gave stands, since masks and biases are shaped by it.
int64_t bound(const at::Tensor& cu_seqlens, const std::optional<int64_t>& given, const at::Tensor& tokens) {
  if (given) return *given;
  return cu_seqlens.is_cpu() ? longest_sequence(cu_seqlens) : tokens.size(0);
}

}  // namespace

int64_t longest_sequence(const at::Tensor& cu_seqlens) {
  const auto offsets = cu_seqlens.accessor<int32_t, 1>();
  int64_t longest = 0;
  for (int64_t i = 1; i < offsets.size(0); ++i) longest = std::max<int64_t>(longest, offsets[i] - offsets[i - 1]);
  return longest;
}

SequenceLengths longest_sequences(const AttentionInputs& in) {
  if (!in.packed()) return {in.q.size(2), in.k.size(2)};
  return {bound(*in.cu_seqlens_q, in.max_seqlen_q, in.q), bound(*in.cu_seqlens_k, in.max_seqlen_k, in.k)};
}

}  // namespace flash_attn_ext::host
