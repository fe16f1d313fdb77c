#include "kernels/plan/plan.h"
#include "kernels/sm80/backward/relative_dbias_over_batch.cuh"
#include "kernels/sm80/sm80_kernels.h"

namespace flash_attn_ext::sm80 {

cudaError_t run_relative_dbias_over_batch(const BackwardParams& p, const BackwardPlan& plan, cudaStream_t stream) {
  RelativeDbiasOverBatchParams params = {};
  params.p = p;
  params.entries = static_cast<int>(p.batch * (p.dbias.per_head ? 1 : p.num_heads_q));
  params.scale = static_cast<float>(p.score_mod.scale);
  params.group = attention::Divisor::of(static_cast<uint32_t>(p.queries_per_key_head()));
  params.blocks = BlockDiagonals::of(p, kDbiasTile, plan.dbias_splits);
  params.diagonal_sums = p.dbias_partials;
  if (params.blocks.bytes() != plan.workspace.dbias_partials.bytes) return cudaErrorInvalidValue;
  return with_element(p.element, /*tf32=*/false, [&](auto element) {
    using Element = decltype(element);
    if constexpr (sizeof(Element) == 2) {
      const auto run = [&](auto head_dim) {
        return p.dropout.enabled() ? relative_dbias_over_batch<Element, head_dim(), true>(params, stream)
                                   : relative_dbias_over_batch<Element, head_dim(), false>(params, stream);
      };
      return plan.dscore_head_dim == 32 ? run(std::integral_constant<int, 32>())
                                        : run(std::integral_constant<int, 64>());
    }
    return cudaErrorInvalidValue;
  });
}

}  // namespace flash_attn_ext::sm80
