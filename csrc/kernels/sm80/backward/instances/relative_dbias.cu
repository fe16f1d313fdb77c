#include "kernels/sm80/backward/relative_dbias.cuh"
#include "kernels/sm80/sm80_kernels.h"

namespace flash_attn_ext::sm80 {

cudaError_t run_relative_dbias(const BackwardParams& p, const BackwardPlan& plan, cudaStream_t stream) {
  return with_element(p.element, /*tf32=*/false,
                      [&](auto element) { return relative_dbias<InMemory<decltype(element)>>(p, plan, stream); });
}

}  // namespace flash_attn_ext::sm80
