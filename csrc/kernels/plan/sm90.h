// The parts of plans on Hopper.
#pragma once

#include <optional>

#include "attention/params.h"
#include "kernels/plan/plan.h"
#include "kernels/plan/visit_order.h"

namespace flash_attn_ext::plan {

// By what happens to a score, whatever kernels there are. A float32 bias beside 16-bit elements is for the portable
// kernels.
Variant wanted_variant_sm90(const attention::AttentionParams& params);

// Whether a forward call takes a kernel whose tile of keys holds all keys of a sequence, and its plan.
bool takes_all_keys(const attention::ForwardParams& params);
ForwardPlan plan_forward_all_keys(const attention::ForwardParams& params, const Limits& limits);

// Floats for each query that the kernel for all gradients reads.
inline constexpr int kBackwardStatistics = 8;

// In which order `blocks` resident blocks take tiles of keys.
VisitOrder visit_order(const attention::BackwardParams& params, int64_t blocks);

// Whether a backward call takes the kernel in which few queries stay and their keys stream past, and its plan.
bool keeps_queries(const attention::BackwardParams& params);
BackwardPlan plan_backward_few_queries(const attention::BackwardParams& params, const Limits& limits);

// For head dims and scores beyond those of the one kernel: the plan that stores scores. None where there is no kernel,
// or not even one key head's fit the bound.
std::optional<BackwardPlan> plan_backward_sm90_storing(const attention::BackwardParams& params, const Limits& limits);

}  // namespace flash_attn_ext::plan
