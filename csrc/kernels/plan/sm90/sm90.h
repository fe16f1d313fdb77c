// The functions that make up plans on Hopper.
#pragma once

#include <optional>

#include "attention/params.h"
#include "kernels/config/sm90.h"
#include "kernels/plan/plan.h"
#include "kernels/schedule/loop_order.h"

namespace flash_attn_ext::plan {

// The number of queries and keys of a short call at head dims up to 64. This backend's tiles may be so empty there that
// the portable kernels, which have several small CTAs per SM, are faster. They run instead of all generic kernels, and
// in other cases that plan/sm90/forward.cpp and plan/sm90/backward.cpp name.
inline constexpr int64_t kShortTokens = 256;
// Up to this number of queries, they run in short calls where scores are only scaled; in the backward pass also where a
// bias of q's dtype has a gradient.
inline constexpr int64_t kPortableQueries = 128;

// With more keys per query than this, the contributors of a tile of queries would wait on its dQ semaphore. Phases of
// key tiles then have dQ accumulators of their own, as many as a pair has key tiles in flight, so that contributors to
// the same accumulator rarely overlap, and L2 still holds it. With a mask, kernels without semaphores run instead.
inline constexpr int64_t kMostKeysPerQuery = 8;
inline bool has_few_queries(const attention::AttentionParams& p) {
  return p.sequences.max_seqlen_k > kMostKeysPerQuery * p.sequences.max_seqlen_q;
}

// The score mode that the scores need, whether or not it has a kernel. A float32 bias beside 16-bit elements is for
// generic kernels, and in the forward pass for the portable ones.
ScoreMode score_mode_sm90(const attention::AttentionParams& params);

// Whether there is memory for the boxes of a relative-position bias, if the call has one. They grow with the number of
// heads times tokens, while the bias itself has one value per key - query of a head.
bool may_write_bias_boxes(const attention::AttentionParams& params, const Limits& limits);

// score_mode_sm90() where a bias without memory for its boxes is for generic kernels, which read it in place.
ScoreMode score_mode_sm90(const attention::AttentionParams& params, const Limits& limits);

// Whether weights may vanish in the key-stationary kernel. Above head dim 64 it keeps those of bfloat16 calls in
// float16. A sink may take so much of a row's weight that all others are smaller than float16's smallest number.
bool weights_may_vanish(const attention::AttentionParams& params);

// Whether scores are scaled by a positive number and changed by ALiBi slopes only.
bool has_only_alibi(const attention::AttentionParams& params);

// Whether the first query sees a multiple of KeyBiasMaxima::kKeys keys, and one more. A larger tile of queries then
// sees all keys of which the backward pass subtracts the maximum for one of them.
bool has_aligned_diagonal(const attention::AttentionParams& params);

// kKeyBias or kKeyBiasDropout, where one of these is all that a call needs, whatever hides keys by position.
std::optional<ScoreMode> key_bias_score_by_position(const attention::AttentionParams& params);

// The same where every query sees every key.
std::optional<ScoreMode> key_bias_score(const attention::AttentionParams& params);

// Up to this number of queries and keys, the portable kernels run up to head dim 64, except with ALiBi alone.
inline constexpr int64_t kPortableTokens = 64;

// Whether the key-stationary kernels may compute the gradient of a call's key bias, which they sum while they compute
// dQ, dK and dV. Where they may, the forward pass reads a float32 bias on Hopper, too.
bool may_sum_dscores(const attention::AttentionParams& params);

// Whether the kernels that can do that run: for that gradient, or because they read a float32 bias as the forward pass
// does.
bool sums_dscores(const attention::BackwardParams& params);

// Whether scores are scaled by a positive number, and a mask hides the same keys from all queries of a head.
bool has_only_key_mask(const attention::AttentionParams& params);

// Whether a call has a mask of keys, and nothing else that changes scores but dropout. Kernels of a key bias take it,
// once the mask is written as a bias.
bool may_have_mask_as_bias(const attention::AttentionParams& params);

// Whether a call has a 16-bit bias for each query and key whose rows are not contiguous or do not begin at multiples of
// 16 bytes, and there is memory for a copy of it that kernels can read.
bool may_align_bias(const attention::AttentionParams& params, const Limits& limits);

// The address that memory of the workspace has in a plan, where it has none yet. It is not null, and aligned; plans
// look at nothing else.
void* address_in_workspace();

// The backward plan of a call with a mask of keys as a key bias, and of one with an aligned copy of its bias. There is
// none if the plan would choose a kernel that does not need that form.
std::optional<BackwardPlan> plan_backward_mask_as_bias(const attention::BackwardParams& params, const Limits& limits);
std::optional<BackwardPlan> plan_backward_aligned_bias(const attention::BackwardParams& params, const Limits& limits);

// The backward plan of a call that lacks dQ, or both dK and dV, by kernels that compute all of them. There is none
// where other kernels are faster.
std::optional<BackwardPlan> plan_backward_unwanted(const attention::BackwardParams& params, const Limits& limits);

// Plans the gradient of slopes: in Hopper's own kernel, or where that does not take the call, in a portable one.
void plan_slope_gradient(BackwardPlan& plan, const attention::BackwardParams& params);

// Plans the exact delta beside a float32 key bias, before the key-stationary kernels.
void plan_exact_delta_of_key_bias(BackwardPlan& plan, const attention::BackwardParams& params);

// Whether kernels read a mask, intervals or lists of blocks as bits.
bool has_bits_of_mask(const attention::AttentionParams& params);

// The score mode of a call with a softcap or ALiBi slopes, alone or beside a mask, intervals or lists of blocks. There
// is none where anything else changes scores, or weights are dropped.
std::optional<ScoreMode> softcap_or_alibi_score(const attention::AttentionParams& params);

// Whether TMA, and copies of 16 bytes, can read tiles of a bias.
bool has_bias_boxes(const attention::BroadcastView& bias);

// Whether a call takes the kernels of short heads with a bias and a mask of keys, and the plans of such a call. They
// are portable kernels that are chosen on Hopper.
bool takes_short_bias(const attention::ForwardParams& params);
bool takes_short_bias(const attention::BackwardParams& params);
ForwardPlan plan_forward_short_bias(const attention::ForwardParams& params);
BackwardPlan plan_backward_short_bias(const attention::BackwardParams& params, const Limits& limits);

// Whether the gradient of a bias that all batch entries share is computed tile by tile, from recomputed dS, beside
// kernels of either backend that compute the other gradients, and what such a plan has for it.
bool takes_dbias_over_batch(const attention::BackwardParams& params);
void plan_dbias_over_batch(BackwardPlan& plan, const attention::BackwardParams& params, const Limits& limits);

// The same for a relative-position bias.
bool takes_relative_dbias_over_batch(const attention::BackwardParams& params);
void plan_relative_dbias_over_batch(BackwardPlan& plan, const attention::BackwardParams& params, const Limits& limits);

// Whether a forward call takes a single-tile kernel, whose key tile holds all keys of a sequence, and the plan of such
// a call.
bool takes_single_tile(const attention::ForwardParams& params);
ForwardPlan plan_forward_single_tile(const attention::ForwardParams& params, const Limits& limits);

// The floats for each query that the key-stationary kernel reads.
inline constexpr int kKeyStationaryStatistics = 8;

// The order in which `blocks` persistent CTAs fetch key tiles. query_tiles: of a head that a launch computes, at most.
LoopOrder loop_order(const attention::BackwardParams& params, int64_t blocks, int64_t query_tiles);

// The bytes of partial dK and dV of a key tile.
inline int64_t partial_sums_bytes(sm90::HeadDims dims) {
  return LoopOrder::kKeys * (dims.qk + dims.v) * int64_t{sizeof(float)};
}
// Those of a pair.
inline int64_t partial_sums_bytes(const LoopOrder& order, sm90::HeadDims dims) {
  return order.tiles * partial_sums_bytes(dims);
}

// Whether a backward call takes the query-stationary kernel, in which few queries stay and their keys stream past, and
// the plan of such a call.
bool takes_query_stationary(const attention::BackwardParams& params);
BackwardPlan plan_backward_query_stationary(const attention::BackwardParams& params, const Limits& limits);

// The two-pass plan, for head dims and scores that the key-stationary kernel does not cover. There is none where there
// is no kernel, or where too few scores fit the memory bound.
std::optional<BackwardPlan> plan_backward_two_pass(const attention::BackwardParams& params, const Limits& limits);

}  // namespace flash_attn_ext::plan
