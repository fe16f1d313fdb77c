// Plans the exact delta, and the gradient of slopes, beside Hopper's kernels of the other gradients.
#include "kernels/config/exact_delta.h"

#include <algorithm>
#include <iterator>

#include "attention/division.h"
#include "kernels/plan/plan.h"
#include "kernels/plan/sm80/sm80.h"
#include "kernels/plan/sm90/sm90.h"

namespace flash_attn_ext::plan {

namespace {

// The row of the table for a call, or kNoExactDelta.
int find_row(const attention::BackwardParams& p, bool adds_key_bias) {
  const auto* const row = std::ranges::find_if(sm90::kExactDeltaConfigs, [&](const sm90::ExactDeltaConfig& row) {
    return row.adds_key_bias == adds_key_bias && largest_head_dim(p) <= row.head_dim;
  });
  const bool exists = row != std::end(sm90::kExactDeltaConfigs);
  return exists ? static_cast<int>(row - std::begin(sm90::kExactDeltaConfigs)) : BackwardPlan::kNoExactDelta;
}

void append_counter(BackwardPlan& plan) {
  plan.workspace.exact_delta_counter = append(plan.workspace.bytes, int64_t{sizeof(uint32_t)});
}

}  // namespace

void plan_slope_gradient(BackwardPlan& plan, const attention::BackwardParams& p) {
  const int row = has_only_alibi(p) ? find_row(p, /*adds_key_bias=*/false) : BackwardPlan::kNoExactDelta;
  if (row == BackwardPlan::kNoExactDelta) {
    plan_dalibi(plan, p);
    return;
  }
  plan.exact_delta_row = row;
  plan.alibi_partials_per_head = attention::ceil_div(p.sequences.max_seqlen_q, sm90::kExactDeltaQueries);
  const int64_t partials = p.batch * p.num_heads_q * plan.alibi_partials_per_head;
  plan.workspace.alibi_partials = append(plan.workspace.bytes, partials * int64_t{sizeof(float)});
  append_counter(plan);
}

void plan_exact_delta_of_key_bias(BackwardPlan& plan, const attention::BackwardParams& p) {
  plan.exact_delta_row = find_row(p, /*adds_key_bias=*/true);
  plan.delta = DeltaSource::kExactKernel;
  append_counter(plan);
}

}  // namespace flash_attn_ext::plan
