#include "host/checks/sequence_lengths.h"

#include <algorithm>

namespace flash_attn_ext::host {
namespace {

// Where the longest length of a packed batch's queries or keys may be known from.
struct LengthSources {
  const at::Tensor& cu_seqlens;
  const std::optional<int64_t>& given;
  int64_t num_tokens;
  int64_t table_dim;  // of a bias or mask
};

// Whether a table may be as long as the longest sequence: a length of 1 is broadcast, and with one below the mean the
// sequences could not hold all tokens.
bool may_be_longest(int64_t length, int64_t batch, int64_t num_tokens) {
  return length > 1 && length <= num_tokens && length >= (num_tokens + batch - 1) / std::max<int64_t>(batch, 1);
}

// A bound that the caller gives is used as it is, because masks and biases have its size. Without one, and with lengths
// on a device, the size of a mask or bias tells what the caller knows about them.
int64_t bound(const LengthSources& of, const AttentionInputs& in) {
  if (of.given) return *of.given;
  if (of.cu_seqlens.is_cpu()) return longest_sequence(of.cu_seqlens);
  for (const auto* table : {&in.bias, &in.mask}) {
    if (!*table || (*table)->dim() != 4) continue;
    const int64_t length = (*table)->size(of.table_dim);
    if (may_be_longest(length, in.batch(), of.num_tokens)) return length;
  }
  return of.num_tokens;
}

}  // namespace

int64_t longest_sequence(const at::Tensor& cu_seqlens) {
  const auto offsets = cu_seqlens.accessor<const int32_t, 1>();
  int64_t longest = 0;
  for (int64_t i = 1; i < offsets.size(0); ++i) longest = std::max<int64_t>(longest, offsets[i] - offsets[i - 1]);
  return longest;
}

SequenceLengths longest_sequences(const AttentionInputs& in) {
  if (!in.packed()) return {in.q.size(2), in.k.size(2)};
  return {bound({*in.cu_seqlens_q, in.max_seqlen_q, in.q.size(0), 2}, in),
          bound({*in.cu_seqlens_k, in.max_seqlen_k, in.k.size(0), 3}, in)};
}

}  // namespace flash_attn_ext::host
