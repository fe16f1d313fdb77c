// Launches the kernels of the gradient of ALiBi slopes.
#pragma once

#include <algorithm>

#include "kernels/common/launch/launch_early.cuh"
#include "kernels/common/launch/with_row.h"
#include "kernels/plan/plan.h"
#include "kernels/sm90/backward/slope_gradient/slope_gradient.cuh"
#include "kernels/sm90/sm90_kernels.h"

namespace flash_attn_ext::sm90 {

template <class Element>
cudaError_t slope_gradient(const attention::BackwardParams& p, const plan::BackwardPlan& plan, void* workspace,
                           cudaStream_t stream) {
  SlopeGradientArguments args = {};
  args.params = p;
  args.schedule = make_schedule(p, {.pairs = all_pairs(p),
                                    .order = PairOrder::kEntryMajor,
                                    .rows = Rows::kQueries,
                                    .tile_rows = kSlopeGradientQueries,
                                    .slices = 1,
                                    .element_bytes = sizeof(Element),
                                    .l2_bytes = plan.l2_bytes});
  args.partials = plan.workspace.alibi_partials.in<float>(workspace);
  args.work_counter =
      reinterpret_cast<uint32_t*>(args.partials + p.batch * p.num_heads_q * plan.alibi_partials_per_head);
  args.scale_log2e = static_cast<float>(p.score_mod.scale) * kLog2e;
  if (args.schedule.num_blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const cudaError_t error = cudaMemsetAsync(args.work_counter, 0, sizeof(*args.work_counter), stream);
  if (error != cudaSuccess) return error;
  return common::with_row<kSlopeGradientConfigs>(plan.slope_row, [&](auto row) {
    using Traits = SlopeGradientTraits<Element, kSlopeGradientConfigs[row()]>;
    using Kernel = KernelShape<SlopeGradientShared, Traits>;
    static_assert(sizeof(typename Kernel::Shared) <= kSharedBytes);
    const cudaError_t made = make_tma_descriptors(args, Traits::kQueries, Traits::kKeys);
    if (made != cudaSuccess) return made;
    const int64_t blocks = std::min<int64_t>(args.schedule.num_blocks, plan.persistent_ctas);
    return common::launch_blocks_early<Kernel>(slope_gradient_kernel<Traits>, blocks, stream, args);
  });
}

}  // namespace flash_attn_ext::sm90
