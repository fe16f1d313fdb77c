// Launches the kernels of the exact delta.
#pragma once

#include <algorithm>

#include "kernels/common/launch/launch_early.cuh"
#include "kernels/common/launch/with_row.h"
#include "kernels/plan/plan.h"
#include "kernels/sm90/backward/exact_delta/exact_delta.cuh"
#include "kernels/sm90/sm90_kernels.h"

namespace flash_attn_ext::sm90 {

template <class Element>
cudaError_t exact_delta(const attention::BackwardParams& p, const plan::BackwardPlan& plan, void* workspace,
                        cudaStream_t stream) {
  ExactDeltaArguments args = {};
  args.params = p;
  args.schedule = make_schedule(p, {.pairs = all_pairs(p),
                                    .order = PairOrder::kEntryMajor,
                                    .rows = Rows::kQueries,
                                    .tile_rows = kExactDeltaQueries,
                                    .slices = 1,
                                    .element_bytes = sizeof(Element),
                                    .l2_bytes = plan.l2_bytes});
  args.partials = plan.workspace.alibi_partials.in<float>(workspace);
  args.work_counter = plan.workspace.exact_delta_counter.in<uint32_t>(workspace);
  args.key_bias_maxima =
      attention::KeyBiasMaxima::in(plan.workspace.bias_maxima.in<float>(workspace), attention::Float32KeyBias::of(p));
  args.scale_log2e = static_cast<float>(p.score_mod.scale) * kLog2e;
  if (args.schedule.num_blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  cudaError_t error = cudaMemsetAsync(args.work_counter, 0, sizeof(*args.work_counter), stream);
  if (error == cudaSuccess && kExactDeltaConfigs[plan.exact_delta_row].adds_key_bias) {
    // NaN: work tiles that see no key write no delta.
    error = cudaMemsetAsync(plan.workspace.delta.in<void>(workspace), 0xFF, plan.workspace.delta.bytes, stream);
  }
  if (error != cudaSuccess) return error;
  return common::with_row<kExactDeltaConfigs>(plan.exact_delta_row, [&](auto row) {
    using Traits = ExactDeltaTraits<Element, kExactDeltaConfigs[row()]>;
    using Kernel = KernelShape<ExactDeltaShared, Traits>;
    static_assert(sizeof(typename Kernel::Shared) <= kSharedBytes);
    const cudaError_t made = make_tma_descriptors(args, Traits::kQueries, Traits::kKeys);
    if (made != cudaSuccess) return made;
    const int64_t blocks = std::min<int64_t>(args.schedule.num_blocks, plan.persistent_ctas);
    return common::launch_blocks_early<Kernel>(exact_delta_kernel<Traits>, blocks, stream, args);
  });
}

}  // namespace flash_attn_ext::sm90
