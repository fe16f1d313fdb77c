// Plans the gradient of ALiBi slopes beside Hopper's kernels of the other gradients.
#include "kernels/config/slope_gradient.h"

#include <algorithm>
#include <iterator>

#include "attention/division.h"
#include "kernels/plan/plan.h"
#include "kernels/plan/sm80/sm80.h"
#include "kernels/plan/sm90/sm90.h"

namespace flash_attn_ext::plan {

void plan_slope_gradient(BackwardPlan& plan, const attention::BackwardParams& p) {
  const auto* const row = std::ranges::find_if(sm90::kSlopeGradientConfigs, [&](const sm90::SlopeGradientConfig& row) {
    return largest_head_dim(p) <= row.head_dim;
  });
  if (!has_only_alibi(p) || row == std::end(sm90::kSlopeGradientConfigs)) {
    plan_dalibi(plan, p);
    return;
  }
  plan.slope_row = static_cast<int>(row - std::begin(sm90::kSlopeGradientConfigs));
  plan.alibi_partials_per_head = attention::ceil_div(p.sequences.max_seqlen_q, sm90::kSlopeGradientQueries);
  const int64_t partials = p.batch * p.num_heads_q * plan.alibi_partials_per_head;
  // The counter of work tiles follows them.
  plan.workspace.alibi_partials = append(plan.workspace.bytes, (partials + 1) * int64_t{sizeof(float)});
}

}  // namespace flash_attn_ext::plan
