// The parts of the plan of a backward pass on Hopper.
#pragma once

#include <optional>

#include "attention/params.h"
#include "kernels/plan/plan.h"
#include "kernels/plan/visit_order.h"

namespace flash_attn_ext::plan {

// In which order `blocks` resident blocks take tiles of keys.
VisitOrder visit_order(const attention::BackwardParams& params, int64_t blocks);

// For head dims beyond those of the one kernel: the plan that stores scores. None where not even one key head's fit the
// bound.
std::optional<BackwardPlan> plan_backward_sm90_wide(const attention::BackwardParams& params, const Limits& limits);

}  // namespace flash_attn_ext::plan
