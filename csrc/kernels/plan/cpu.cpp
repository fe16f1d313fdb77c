// Plans the passes of the CPU backend.
#include "kernels/config/cpu.h"

#include "kernels/plan/plan.h"

namespace flash_attn_ext::plan {
// Only lengths decide, so that the sums are the same for any number of threads, heads and batch entries.
ForwardPlan plan_forward_cpu(const attention::ForwardParams& p, const Limits&) {
  ForwardPlan plan;
  plan.row_max = p.row_max.present();
  const bool one_tile = p.sequences.max_seqlen_q <= cpu::kStationaryRows;
  if (one_tile && p.sequences.max_seqlen_k > cpu::kKeysPerSplit) plan.keys_per_split = cpu::kKeysPerSplit;
  return plan;
}

BackwardPlan plan_backward_cpu(const attention::BackwardParams& p, const Limits&) {
  BackwardPlan plan;
  // In gradients that sum dS over queries, the terms cancel, but the error that a rounded out leaves in delta does not.
  const bool dbias_sums_dscores = p.dbias.present() && !dbias_is_row_sums(p);
  const bool needs_exact = dbias_sums_dscores || has_precise_dbias(p) || p.dalibi_slopes;
  plan.delta = attention::is_16_bit(p.element) && needs_exact ? DeltaSource::kExactKernel : DeltaSource::kOwnKernel;
  if (p.dbias.present()) {
    plan.dbias = dbias_is_row_sums(p) ? BiasGradientSource::kRowSums : BiasGradientSource::kSameDscores;
  }
  plan.workspace.delta = append(plan.workspace.bytes, statistic_bytes(p));
  return plan;
}

}  // namespace flash_attn_ext::plan
