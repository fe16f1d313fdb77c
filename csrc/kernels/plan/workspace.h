// Lays out a call's one allocation.
#pragma once

#include "attention/division.h"
#include "kernels/plan/plan.h"

namespace flash_attn_ext::plan {

// Appends a part of `bytes`. total: the bytes of all parts so far.
inline WorkspacePart append(int64_t& total, int64_t bytes) {
  constexpr int64_t kAlignment = 256;  // that of cudaMalloc, so that kernels may read parts in vectors of any width
  const WorkspacePart part = {total, bytes};
  total += attention::ceil_div(bytes, kAlignment) * kAlignment;
  return part;
}

// The bytes of a value of the accumulate type for each query of each query head, laid out as the LSE.
inline int64_t statistic_bytes(const attention::AttentionParams& p) {
  const int64_t rows = p.sequences.cu_seqlens_q != nullptr ? p.sequences.total_q : p.batch * p.sequences.max_seqlen_q;
  return rows * p.num_heads_q * (p.element == attention::ElementType::kFloat64 ? 8 : 4);
}

}  // namespace flash_attn_ext::plan
