#include "kernels/sm80/backward/dbias_of_diagonals.cuh"
#include "kernels/sm80/sm80_kernels.h"

namespace flash_attn_ext::sm80 {

cudaError_t run_diagonals_over_batch(const BackwardParams& p, const BackwardPlan& plan, float* band_sums,
                                     cudaStream_t stream) {
  DbiasOfDiagonalsParams params = {};
  params.p = p;
  params.entries = static_cast<int>(p.batch * (p.dbias.per_head ? 1 : p.num_heads_q));
  params.scale = static_cast<float>(p.score_mod.scale);
  params.group = attention::Divisor::of(static_cast<uint32_t>(p.queries_per_key_head()));
  params.bands = diagonal_bands(p, kDbiasTile, 0);
  params.bands.splits = static_cast<int>(plan.workspace.dbias_parts.bytes / params.bands.bytes());
  params.band_sums = band_sums;
  return with_element(p.element, /*tf32=*/false, [&](auto element) {
    using Element = decltype(element);
    if constexpr (sizeof(Element) == 2) {
      return plan.dscore_head_dim == 32 ? dbias_of_diagonals<Element, 32>(params, stream)
                                        : dbias_of_diagonals<Element, 64>(params, stream);
    }
    return cudaErrorInvalidValue;
  });
}

}  // namespace flash_attn_ext::sm80
