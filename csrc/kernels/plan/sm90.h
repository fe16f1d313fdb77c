// The functions that make up plans on Hopper.
#pragma once

#include <optional>

#include "attention/params.h"
#include "kernels/plan/plan.h"
#include "kernels/schedule/loop_order.h"

namespace flash_attn_ext::plan {

// The variant that the scores need, whether or not it has a kernel. A float32 bias beside 16-bit elements is for the
// portable kernels.
Variant wanted_variant_sm90(const attention::AttentionParams& params);

// Whether a forward call takes a single-tile kernel, whose key tile holds all keys of a sequence, and the plan of such
// a call.
bool takes_single_tile(const attention::ForwardParams& params);
ForwardPlan plan_forward_single_tile(const attention::ForwardParams& params, const Limits& limits);

// The floats for each query that the key-stationary kernel reads.
inline constexpr int kBackwardStatistics = 8;

// The order in which `blocks` persistent CTAs fetch key tiles.
LoopOrder loop_order(const attention::BackwardParams& params, int64_t blocks);

// Whether a backward call takes the query-stationary kernel, in which few queries stay and their keys stream past, and
// the plan of such a call.
bool keeps_queries(const attention::BackwardParams& params);
BackwardPlan plan_backward_query_stationary(const attention::BackwardParams& params, const Limits& limits);

// The two-pass plan, for head dims and scores that the key-stationary kernel does not cover. There is none where there
// is no kernel, or where too few scores fit the memory bound.
std::optional<BackwardPlan> plan_backward_two_pass(const attention::BackwardParams& params, const Limits& limits);

}  // namespace flash_attn_ext::plan
