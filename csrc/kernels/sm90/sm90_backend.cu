#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attention/key_bias.h"
#include "kernels/common/launch/with_row.h"
#include "kernels/common/masks/key_bias.h"
#include "kernels/common/masks/mask_tiles.h"
#include "kernels/common/sums/sums.h"
#include "kernels/config/sm90_forward.h"
#include "kernels/config/two_pass.h"
#include "kernels/plan/mask_tiles.h"
#include "kernels/sm90/sm90_backend.h"
#include "kernels/sm90/sm90_kernels.h"

namespace flash_attn_ext::sm90 {
namespace {

template <class Element>
cudaError_t run_planned(const ForwardCall& call, const plan::ForwardPlan& plan, void* workspace, cudaStream_t stream) {
  if (plan.kernel == plan::ForwardKernel::kSingleTile) {
    return forward_single_tile<Element>(call, plan, workspace, stream);
  }
  return common::with_row<kForwardConfigs>(plan.row, [&](auto row) {
    constexpr ForwardConfig kConfig = kForwardConfigs[row()];
    return forward<Element, kConfig.score, kConfig.kind()>(call, plan, workspace, stream);
  });
}

template <class Element>
cudaError_t run_planned(const attention::BackwardParams& params, const plan::BackwardPlan& plan, void* workspace,
                        cudaStream_t stream) {
  if (plan.kernels == plan::BackwardKernels::kKeyStationary) {
    return backward_key_stationary<Element>(params, plan, workspace, stream);
  }
  if (plan.kernels == plan::BackwardKernels::kQueryStationary) {
    return backward_query_stationary<Element>(params, plan, workspace, stream);
  }
  return kTwoPassConfigs[plan.row].dq_from_tiles ? backward_two_pass<Element, true>(params, plan, workspace, stream)
                                                 : backward_two_pass<Element, false>(params, plan, workspace, stream);
}

template <class... Arguments>
cudaError_t exact_delta_of(attention::ElementType element, const Arguments&... arguments) {
  return element == attention::ElementType::kBFloat16 ? exact_delta<__nv_bfloat16>(arguments...)
                                                      : exact_delta<__half>(arguments...);
}

// Writes the boxes of a relative-position bias, if the plan has them.
template <class Plan>
cudaError_t write_boxes_of(const Plan& plan, const attention::AttentionParams& p, void* workspace,
                           cudaStream_t stream) {
  void* const boxes = plan.workspace.bias_boxes.template in<void>(workspace);
  return boxes == nullptr ? cudaSuccess : write_relative_bias_boxes(p, boxes, stream);
}

// Writes the key bias that stands for the mask, if the plan has one.
template <class Params, class Plan>
cudaError_t replace_mask_by_bias(Params& p, const Plan& plan, void* workspace, cudaStream_t stream) {
  void* const bias = plan.workspace.mask_as_bias.template in<void>(workspace);
  if (bias == nullptr) return cudaSuccess;
  const cudaError_t error = common::write_mask_as_bias(p, bias, stream);
  p = attention::with_mask_as_bias(p, bias);
  return error;
}

// Writes the maxima of the key bias, if the plan has them.
template <class Plan>
cudaError_t write_maxima_of_bias(const attention::AttentionParams& p, const Plan& plan, void* workspace,
                                 cudaStream_t stream) {
  constexpr bool kRunning = std::is_same_v<Plan, plan::BackwardPlan>;
  auto* const maxima = plan.workspace.bias_maxima.template in<float>(workspace);
  return maxima == nullptr ? cudaSuccess : common::write_key_bias_maxima(p, kRunning, maxima, stream);
}

// Copies the key bias in float32, if the plan has room for it.
cudaError_t replace_bias_by_float32(attention::BackwardParams& p, const plan::BackwardPlan& plan, void* workspace,
                                    cudaStream_t stream) {
  auto* const copy = plan.workspace.float32_bias.in<float>(workspace);
  if (copy == nullptr) return cudaSuccess;
  const cudaError_t error = common::copy_key_bias(p, copy, stream);
  p.score_mod.bias = attention::Float32KeyBias::of(p).view(copy);
  return error;
}

// Writes what the kernels read of a mask.
template <class Plan>
cudaError_t scan_mask(attention::AttentionParams& p, const Plan& plan, void* workspace, cudaStream_t stream) {
  auto* const tiles = plan.workspace.mask_tiles.template in<uint8_t>(workspace);
  auto* const bits = plan.workspace.mask_bits.template in<void>(workspace);
  return bits == nullptr ? common::scan_mask_tiles(p, tiles, stream) : common::pack_mask(p, tiles, bits, stream);
}

// The same for a mask that hides keys. It also finds the batch entries for which one interval of keys is left.
cudaError_t scan_key_mask(ForwardCall& call, const plan::ForwardPlan& plan, void* workspace, cudaStream_t stream) {
  const common::KeyMaskMemory memory = {.tiles = plan.workspace.mask_tiles.in<uint8_t>(workspace),
                                        .bits = plan.workspace.mask_bits.in<void>(workspace),
                                        .intervals = plan.workspace.intervals.in<attention::KeyInterval>(workspace)};
  const bool per_entry = call.score_mod.mask.batch_stride != 0;
  call.intervals = {.data = memory.intervals,
                    .entries = static_cast<int>(plan::count_mask_tiles(call).batch),
                    .entry_stride = per_entry ? 1 : 0,
                    .moves_queries = !call.visibility.unlimited() || call.score_mod.alibi.present()};
  // Alignments agree here (plan_intervals), and intervals with fewer keys keep the diagonal.
  call.visibility.top_left = true;
  return common::scan_key_mask(call, memory, stream);
}

// The same for a key bias, which leaves intervals where it is padding.
cudaError_t scan_key_bias(ForwardCall& call, const plan::ForwardPlan& plan, void* workspace, cudaStream_t stream) {
  auto* const intervals = plan.workspace.intervals.in<attention::KeyInterval>(workspace);
  call.intervals = {.data = intervals, .entries = static_cast<int>(call.batch), .entry_stride = 1};
  return common::scan_key_bias(call, intervals, stream);
}

// The gradient of a bias that is broadcast along keys. Its kernel subtracts dlse from delta, which until then must be
// without it.
cudaError_t sum_rows(const attention::BackwardParams& p, cudaStream_t stream) {
  if (p.dlse.present()) {
    attention::DeltaParams delta = attention::delta_params(p);
    delta.dlse = {};
    const cudaError_t error = common::launch_delta(delta, stream);
    if (error != cudaSuccess) return error;
  }
  return common::launch_dbias_from_rows(p, stream);
}

}  // namespace

cudaError_t run_forward(const attention::ForwardParams& params, const plan::ForwardPlan& plan, void* workspace,
                        cudaStream_t stream) {
  ForwardCall call = {params};
  const auto run = [&](const plan::ForwardPlan& plan, void* workspace) {
    return call.element == attention::ElementType::kBFloat16 ? run_planned<__nv_bfloat16>(call, plan, workspace, stream)
                                                             : run_planned<__half>(call, plan, workspace, stream);
  };
  cudaError_t error = replace_mask_by_bias(call, plan, workspace, stream);
  if (error == cudaSuccess) error = write_boxes_of(plan, call, workspace, stream);
  if (error == cudaSuccess) error = write_maxima_of_bias(call, plan, workspace, stream);
  call.key_bias_maxima = attention::KeyBiasMaxima::in(plan.workspace.bias_maxima.in<float>(workspace),
                                                      attention::Float32KeyBias::of(call));
  if (error == cudaSuccess) {
    error = !plan.of_intervals              ? scan_mask(call, plan, workspace, stream)
            : call.score_mod.mask.present() ? scan_key_mask(call, plan, workspace, stream)
                                            : scan_key_bias(call, plan, workspace, stream);
  }
  if (error == cudaSuccess && plan.of_intervals) {
    error = run(*plan.of_intervals, plan.workspace.of_intervals.in<void>(workspace));
  }
  return error == cudaSuccess ? run(plan, workspace) : error;
}

cudaError_t run_backward(const attention::BackwardParams& params, const plan::BackwardPlan& plan, void* workspace,
                         cudaStream_t stream) {
  const bool sums_rows = plan.dbias == plan::BiasGradientSource::kRowSums;
  attention::BackwardParams p = params;
  if (sums_rows || plan.recomputes_dbias()) p.dbias = {};
  p.delta = plan.workspace.delta.like(p.lse, workspace);
  cudaError_t error = replace_mask_by_bias(p, plan, workspace, stream);
  if (error == cudaSuccess) error = replace_bias_by_float32(p, plan, workspace, stream);
  if (error == cudaSuccess) error = write_maxima_of_bias(p, plan, workspace, stream);
  if (error == cudaSuccess) error = write_boxes_of(plan, p, workspace, stream);
  if (error != cudaSuccess) return error;
  if (plan.kernels != plan::BackwardKernels::kKeyStationary) {  // these pack bits of their own
    error = scan_mask(p, plan, workspace, stream);
    if (error != cudaSuccess) return error;
  }
  const bool has_exact_delta = plan.exact_delta_row != plan::BackwardPlan::kNoExactDelta;
  const bool reads_exact_delta = plan.delta == plan::DeltaSource::kExactKernel;
  if (has_exact_delta && reads_exact_delta) error = exact_delta_of(p.element, p, plan, workspace, stream);
  if (error != cudaSuccess) return error;
  error = p.element == attention::ElementType::kBFloat16 ? run_planned<__nv_bfloat16>(p, plan, workspace, stream)
                                                         : run_planned<__half>(p, plan, workspace, stream);
  if (error == cudaSuccess && has_exact_delta && !reads_exact_delta) {  // for slopes
    error = exact_delta_of(p.element, p, plan, workspace, stream);
  }
  p.dbias = params.dbias;
  return error == cudaSuccess && sums_rows ? sum_rows(p, stream) : error;
}

}  // namespace flash_attn_ext::sm90
