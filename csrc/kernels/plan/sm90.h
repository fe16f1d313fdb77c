// What the plan of a backward pass on Hopper decides on its own, for tests.
#pragma once

#include "attention/params.h"
#include "kernels/plan/visit_order.h"

namespace flash_attn_ext::plan {

// In which order `blocks` resident blocks take tiles of keys.
VisitOrder visit_order(const attention::BackwardParams& params, int64_t blocks);

}  // namespace flash_attn_ext::plan
