#include "kernels/plan/plan.h"
#include "kernels/sm80/backward/diagonal_sums.cuh"
#include "kernels/sm80/sm80_backend.h"

namespace flash_attn_ext::sm80 {

cudaError_t run_dbias_of_diagonals(const attention::BackwardParams& params, const plan::BackwardPlan& plan,
                                   void* workspace, cudaStream_t stream) {
  BackwardParams p;
  static_cast<attention::BackwardParams&>(p) = params;
  p.delta = plan.workspace.delta.like(p.lse, workspace);
  auto* const band_sums = plan.workspace.dbias_parts.in<float>(workspace);
  if (band_sums == nullptr) return cudaSuccess;  // there are no scores
  if (plan.dbias == plan::BiasGradientSource::kDiagonalsOverBatch) {
    return run_diagonals_over_batch(p, plan, band_sums, stream);
  }
  return with_element(p.element, /*tf32=*/false, [&](auto element) {
    return diagonal_sums<InMemory<decltype(element)>>(p, plan, band_sums, stream);
  });
}

}  // namespace flash_attn_ext::sm80
