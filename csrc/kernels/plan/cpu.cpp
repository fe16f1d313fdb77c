#include "kernels/plan/plan.h"
#include "kernels/plan/workspace.h"

namespace flash_attn_ext::plan {

ForwardPlan plan_forward_cpu(const attention::ForwardParams&, const Limits&) { return {}; }

BackwardPlan plan_backward_cpu(const attention::BackwardParams& p, const Limits&) {
  BackwardPlan plan;
  // Gradients that are sums of dS over rows cancel; what a rounded out leaves in delta does not.
  const bool sums_over_rows = p.dbias.present() || p.dalibi_slopes || p.dsink;
  plan.delta = attention::is_16_bit(p.element) && sums_over_rows ? DeltaSource::kExactKernel : DeltaSource::kOwnKernel;
  plan.dbias = p.dbias.present() ? BiasGradientSource::kSameDscores : BiasGradientSource::kNone;
  plan.workspace.delta = append(plan.workspace.bytes, statistic_bytes(p));
  return plan;
}

}  // namespace flash_attn_ext::plan
