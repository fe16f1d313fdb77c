// Plans backward passes that lack a gradient which Hopper's kernels compute together with the others.
#include <algorithm>
#include <optional>

#include "attention/unwanted_gradients.h"
#include "kernels/config/key_stationary.h"
#include "kernels/plan/plan.h"
#include "kernels/plan/sm80/sm80.h"
#include "kernels/plan/sm80/split.h"
#include "kernels/plan/sm90/sm90.h"

namespace flash_attn_ext::plan {
namespace {

using attention::BackwardParams;

// dQ alone takes three of the five GEMMs. A portable kernel computes it at least as fast as Hopper's key-stationary
// kernel computes all gradients: where scores are only scaled up to this head dim, elsewhere below these numbers of
// tokens (docs/kernels/log/sm90_backward.md, "Gradients that are not asked for").
constexpr int64_t kHeadDimOfFastDq = 64;
constexpr int64_t kTokensOfFastDq = 1024;
constexpr int64_t kTokensOfFastDqOneSided = 2048;

bool gains_from_all_gradients(const BackwardParams& p) {
  const int64_t queries = p.sequences.max_seqlen_q, keys = visible_keys(p);
  if (sums_dscores(p)) return true;  // portable kernels would compute all dS again
  if (p.dq.data == nullptr) return std::max(queries, keys) > kShortTokens;
  if (has_few_queries(p)) return false;
  if (largest_head_dim(p) > sm90::kLargestKeyStationaryHeadDim) return std::max(queries, keys) > kShortTokens;
  if (largest_head_dim(p) <= kHeadDimOfFastDq && score_mode_sm90(p) == ScoreMode::kScaleOnly) return false;
  return std::min(queries, keys) >= (p.visibility.one_sided() ? kTokensOfFastDqOneSided : kTokensOfFastDq);
}

}  // namespace

std::optional<BackwardPlan> plan_backward_unwanted(const BackwardParams& p, const Limits& limits) {
  const bool lacks_dq = p.dq.data == nullptr, lacks_dkdv = p.dk.data == nullptr && p.dv.data == nullptr;
  if (lacks_dq == lacks_dkdv || !gains_from_all_gradients(p)) return std::nullopt;
  BackwardPlan plan = plan_backward_sm90(attention::with_unwanted_gradient(p, address_in_workspace()), limits);
  if (!plan.is_warp_specialised()) return std::nullopt;
  plan.workspace.unwanted_gradient = append(plan.workspace.bytes, attention::UnwantedGradient::of(p).bytes());
  return plan;
}

}  // namespace flash_attn_ext::plan
