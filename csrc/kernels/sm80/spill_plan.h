// Which scores the backward pass keeps between its kernels, and for how many heads at a time.
//
// Computing S and dP again in the second kernel costs 2 of 7 products of tiles. Where dK and dV both fit into registers
// (head dims up to 128) the dK/dV kernel can keep dS, and dQ = dS K is a plain product. Else the dQ kernel comes first
// and keeps P and dS, and dV = P^T dO and dK = dS^T Q are plain products. A head that needs more memory than there may
// be is computed again.
#pragma once

#include <algorithm>

#include "attention/params.h"
#include "kernels/sm80/launch_tags.cuh"
#include "kernels/tile_config.h"

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

// As few launches as `most` pairs at a time allow, of about the same size, and with all batch entries of a head where
// one can hold them.
inline int64_t in_equal_launches(const attention::BackwardParams& p, int64_t most) {
  const int64_t step = most >= p.batch ? p.batch : 1;
  const int64_t steps = p.batch * p.num_heads_k / step;
  const int64_t launches = (steps + most / step - 1) / (most / step);
  return (steps + launches - 1) / launches * step;
}

inline SpillPlan::Order order_of(const attention::BackwardParams& p) {
  const bool float32 = p.element == attention::ElementType::kFloat32;
  // Single TF32 products take less time than reading dS; three for each of float32's take more.
  if (float32 ? p.allow_tf32 : !attention::is_16_bit(p.element)) return SpillPlan::Order::kRecompute;
  const int64_t head_dim = std::max(p.head_dim_qk, p.head_dim_v);
  const int element_bytes = float32 ? 4 : 2;
  const Variant variant = adds_terms(p) ? Variant::kTerms : backward_variant(p);
  if (dkdv_keeps_scores(element_bytes, head_dim, variant)) return SpillPlan::Order::kKeysFirst;
  if (dq_keeps_scores(element_bytes, head_dim, variant)) return SpillPlan::Order::kQueriesFirst;
  return SpillPlan::Order::kRecompute;
}

inline SpillPlan plan_spill(const attention::BackwardParams& p) {
  const bool dkdv = p.dk.data != nullptr || p.dv.data != nullptr;
  const bool packed = p.sequences.cu_seqlens_q != nullptr;
  const SpillPlan::Order order = order_of(p);
  if (order == SpillPlan::Order::kRecompute || !dkdv || p.dq.data == nullptr) return {};
  if (p.sequences.max_seqlen_q == 0 || p.sequences.max_seqlen_k == 0 || p.batch == 0) return {};
  SpillPlan plan;
  plan.order = order;
  const bool keys_first = order == SpillPlan::Order::kKeysFirst;
  const attention::SequenceTable& lengths = p.sequences;
  using attention::ScoreSpill;
  plan.columns = ScoreSpill::padded(keys_first ? lengths.max_seqlen_q : lengths.max_seqlen_k);
  plan.rows = packed ? ScoreSpill::packed_rows(keys_first ? lengths.total_k : lengths.total_q, p.batch)
                     : ScoreSpill::padded(keys_first ? lengths.max_seqlen_k : lengths.max_seqlen_q);
  // A matrix holds one pair, or all pairs of a key head.
  const int64_t pairs_of_matrix = packed ? p.batch : 1;
  const int64_t matrices = p.batch * p.num_heads_k / pairs_of_matrix;
  const int64_t element_bytes = attention::is_16_bit(p.element) ? 2 : 4;
  const int64_t bytes = p.queries_per_key_head() * plan.rows * plan.columns * element_bytes;
  const int64_t most = std::min(p.spill.max_bytes / (keys_first ? bytes : 2 * bytes), matrices);
  if (most == 0) return {};
  plan.pairs = in_equal_launches(p, most * pairs_of_matrix);
  plan.matrix_bytes = plan.pairs / pairs_of_matrix * bytes;
  return plan;
}

}  // namespace flash_attn_ext::sm80
