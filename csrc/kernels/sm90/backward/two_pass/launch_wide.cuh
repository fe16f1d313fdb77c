// Launches the kernels of a two-pass backward pass above head dim 256, whose dQ comes from stored tiles.
#pragma once

#include "kernels/sm90/backward/two_pass/launch.cuh"

namespace flash_attn_ext::sm90 {

template <class Element>
cudaError_t backward_two_pass_wide(const attention::BackwardParams& p, const plan::BackwardPlan& plan, void* workspace,
                                   cudaStream_t stream) {
  return common::with_row<kTwoPassConfigs>(plan.row, [&](auto row) {
    constexpr TwoPassConfig kConfig = kTwoPassConfigs[row()];
    if constexpr (kConfig.dq_from_tiles) {
      return launch_two_pass<TwoPassScoreTraits<Element, kConfig>>(p, plan, workspace, stream);
    } else {
      return cudaErrorInvalidValue;
    }
  });
}

}  // namespace flash_attn_ext::sm90
