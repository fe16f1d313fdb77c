// What the plans of both passes, on any GPU, ask about a call.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "attention/division.h"
#include "attention/params.h"
#include "kernels/config/sm80.h"
#include "kernels/plan/plan.h"

namespace flash_attn_ext::plan {

// What changes a score between the QK GEMM and the softmax, apart from visibility.
enum class ScoreKind {
  kScale,     // a positive scale, which can be folded into the exponent
  kBiasMask,  // the same, then a bias in q's type, a mask or intervals, or several of them
  kAny,
};

inline ScoreKind score_kind(const attention::ScoreMod& mod) {
  if (mod.scale <= 0.0 || mod.softcap != 0.0 || mod.alibi.present()) return ScoreKind::kAny;
  if (!mod.bias.present() && !mod.hides_keys()) return ScoreKind::kScale;
  return mod.bias.present() && mod.bias.element == attention::ElementType::kFloat32 ? ScoreKind::kAny
                                                                                    : ScoreKind::kBiasMask;
}

// Into how many splits the batch entries are divided that an element of dBias sums, and the heads that share a bias. A
// split has `ctas_of_split` CTAs, and all splits together have about `ctas`.
inline int64_t count_dbias_splits(const attention::BackwardParams& p, int64_t ctas, int64_t ctas_of_split) {
  const int64_t entries = p.batch * (p.dbias.per_head ? 1 : p.num_heads_q);
  return std::clamp<int64_t>(ctas / ctas_of_split, 1, std::max<int64_t>(entries, 1));
}

inline int element_bytes(const attention::AttentionParams& p) { return attention::is_16_bit(p.element) ? 2 : 4; }

inline int64_t largest_head_dim(const attention::AttentionParams& p) { return std::max(p.head_dim_qk, p.head_dim_v); }

inline bool is_packed(const attention::AttentionParams& p) { return p.sequences.cu_seqlens_q != nullptr; }

// The most keys that the queries of a sequence see.
inline int64_t visible_keys(const attention::AttentionParams& p) {
  const attention::SequenceTable& lengths = p.sequences;
  const int64_t keys = is_packed(p) ? std::min(lengths.total_k, lengths.max_seqlen_k) : lengths.max_seqlen_k;
  return std::min(keys, p.visibility.left + p.visibility.right + lengths.max_seqlen_q);
}

// How many pairs a launch has. Launches are as few as `most` pairs at a time allow, of about the same size, and have
// all batch entries of a head where one launch can hold them.
inline int64_t in_equal_launches(const attention::AttentionParams& p, int64_t most) {
  const int64_t step = most >= p.batch ? p.batch : 1;
  const int64_t steps = p.batch * p.num_heads_k / step;
  const int64_t launches = attention::ceil_div(steps, most / step);
  return attention::ceil_div(steps, launches) * step;
}

// Whether rows consist of whole, aligned 16-byte chunks. chunk: the elements of one.
inline bool has_whole_chunks(const attention::MatrixView& view, int64_t columns, int64_t chunk) {
  const int64_t strides = view.batch_stride | view.head_stride | view.row_stride;  // chunk is a power of 2
  return view.column_stride == 1 && (strides | columns) % chunk == 0 &&
         reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
}

// The same for out, dout and the wanted gradients of a call with 16-bit elements.
inline bool has_whole_chunks(const attention::BackwardParams& p) {
  const auto has_chunks = [](const attention::MatrixView& view, int64_t columns) {
    return view.data == nullptr || has_whole_chunks(view, columns, 8);
  };
  return has_chunks(p.out, p.head_dim_v) && has_chunks(p.dout, p.head_dim_v) && has_chunks(p.dq, p.head_dim_qk) &&
         has_chunks(p.dk, p.head_dim_qk) && has_chunks(p.dv, p.head_dim_v);
}

// Whether offsets in bytes within a tile of `rows` rows are 32-bit numbers, with 16-bit elements.
inline bool has_short_strides(int64_t rows, std::initializer_list<const attention::MatrixView*> views) {
  const int64_t end = (int64_t{1} << 32) / (2 * rows);
  return std::ranges::all_of(views, [&](const auto* view) { return view->row_stride < end; });
}

// Whether materialised dS is all that dBias needs. dBias must not be more precise than dS. It must have no sum over
// rows or diagonals, in which the rounding of dS would add up. And dS must be that of the score itself, so there must
// be no softcap. There are kernels for 16-bit scores.
inline bool dbias_may_read_materialised(const attention::BackwardParams& p) {
  return attention::is_16_bit(p.element) && p.score_mod.bias.element != attention::ElementType::kFloat32 &&
         p.dbias.per_query && p.dbias.per_key && !p.score_mod.bias.is_relative() && p.score_mod.softcap == 0.0;
}

// Whether each launch has all heads and batch entries that an element of dBias sums.
inline bool launches_hold_sums_of_dbias(const attention::BackwardParams& p, int64_t pairs_per_launch) {
  const bool over_heads = !p.dbias.per_head && p.num_heads_k > 1;
  const bool over_batch = !p.dbias.per_batch && p.batch > 1;
  return pairs_per_launch >= p.batch * p.num_heads_k ||
         (!over_heads && (!over_batch || pairs_per_launch % p.batch == 0));
}

// Plan gradients that sum recomputed dS, on any GPU: that of ALiBi slopes, and that of a bias.
void plan_dalibi(BackwardPlan& plan, const attention::BackwardParams& params);
void plan_recomputed_dbias(BackwardPlan& plan, const attention::BackwardParams& params);

// Plans the gradient of a relative-position bias, on any GPU.
void plan_relative_dbias(BackwardPlan& plan, const attention::BackwardParams& params, const Limits& limits);
// The splits and the workspace of such a plan, whose blocks have `tile` queries. ctas: about as many as fill
// the GPU.
void divide_relative_dbias(BackwardPlan& plan, const attention::BackwardParams& params, int tile, int64_t ctas);

// Sequences of up to this number of queries fill the smaller tiles of a generic kernel.
inline constexpr int64_t kQueriesOfSmallTiles = 64;

// Whether a call takes a bias-stationary kernel: each sequence is so short that one tile holds it. Only lengths, head
// dims, features and strides decide, so that a result does not depend on the rest of the batch.
bool takes_bias_stationary(const attention::ForwardParams& params);
bool takes_bias_stationary(const attention::BackwardParams& params);
ForwardPlan plan_forward_bias_stationary(const attention::ForwardParams& params, const Limits& limits);
BackwardPlan plan_backward_bias_stationary(const attention::BackwardParams& params, const Limits& limits);

}  // namespace flash_attn_ext::plan
