// Launches the forward-mode kernel that a plan names.
#pragma once

#include "kernels/sm80/launch.cuh"
#include "kernels/sm80/sm80_kernels.h"
#include "kernels/sm80/tangents/tangents.cuh"

namespace flash_attn_ext::sm80 {

template <class Element, int kHeadDim>
cudaError_t tangents(const TangentParams& p, const TangentPlan& plan, cudaStream_t stream) {
  using Kernel = TangentKernel<Element, kHeadDim>;
  const Schedule schedule = make_schedule(p, {.pairs = all_pairs(p),
                                              .rows = Rows::kQueries,
                                              .tile_rows = Kernel::kTile.queries,
                                              .slices = 1,
                                              .element_bytes = 2 * sizeof(Element),  // an element and its tangent
                                              .l2_bytes = plan.l2_bytes});
  return launch<Kernel>(tangent_kernel<Kernel>, p, schedule, stream);
}

}  // namespace flash_attn_ext::sm80
