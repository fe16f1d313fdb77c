// Which scores the backward pass keeps between its kernels, and for how many heads at a time.
//
// Computing S and dP again in the second kernel costs 2 of 7 products of tiles. Where dK and dV both fit into registers
// (head dims up to 128) the dK/dV kernel keeps dS, and dQ = dS K is a plain product. Beyond that they do not: the dQ
// kernel comes first and keeps P and dS, and dV = P^T dO and dK = dS^T Q are plain products. Up to 64, writing and
// reading dS takes longer than the products that it saves, and so does memory for the longest of all sequences in a
// packed batch. A head that needs more memory than there may be is computed again too.
#pragma once

#include <algorithm>

#include "attention/params.h"

namespace flash_attn_ext::sm80 {

struct SpillPlan {
  enum class Order { kRecompute, kKeysFirst, kQueriesFirst };

  Order order = Order::kRecompute;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t matrix_bytes = 0;  // of all heads that are worked on at a time: P's, and dS's
  int64_t pairs = 0;         // of a batch entry and a key head, at a time

  int64_t bytes() const { return order == Order::kQueriesFirst ? 2 * matrix_bytes : matrix_bytes; }
};

inline SpillPlan plan_spill(const attention::BackwardParams& p) {
  const bool half = p.element == attention::ElementType::kBFloat16 || p.element == attention::ElementType::kFloat16;
  const int64_t head_dim = std::max(p.head_dim_qk, p.head_dim_v);
  const bool dkdv = p.dk.data != nullptr || p.dv.data != nullptr;
  const bool packed = p.sequences.cu_seqlens_q != nullptr;
  if (!half || head_dim <= 64 || head_dim > 256 || packed || !dkdv || p.dq.data == nullptr) return {};
  SpillPlan plan;
  plan.order = head_dim <= 128 ? SpillPlan::Order::kKeysFirst : SpillPlan::Order::kQueriesFirst;
  const bool keys_first = plan.order == SpillPlan::Order::kKeysFirst;
  plan.rows = attention::ScoreSpill::padded(keys_first ? p.sequences.max_seqlen_k : p.sequences.max_seqlen_q);
  plan.columns = attention::ScoreSpill::padded(keys_first ? p.sequences.max_seqlen_q : p.sequences.max_seqlen_k);
  const int64_t pair_bytes = p.queries_per_key_head() * plan.rows * plan.columns * 2;
  plan.pairs = std::min(p.spill.max_bytes / (keys_first ? pair_bytes : 2 * pair_bytes), p.batch * p.num_heads_k);
  if (plan.pairs == 0) return {};
  plan.matrix_bytes = plan.pairs * pair_bytes;
  return plan;
}

}  // namespace flash_attn_ext::sm80
