#include <algorithm>
#include <type_traits>

#include "kernels/common/cache/append_kv.h"
#include "kernels/common/float64/float64_attention.h"
#include "kernels/common/masks/mask_tiles.h"
#include "kernels/common/sums/sums.h"
#include "kernels/config/combine.h"
#include "kernels/config/split.h"
#include "kernels/plan/plan.h"
#include "kernels/sm80/launch.cuh"
#include "kernels/sm80/sm80_backend.h"
#include "kernels/sm80/sm80_kernels.h"

namespace flash_attn_ext::sm80 {
namespace {

using plan::BackwardKernels;
using plan::BiasGradientSource;
using plan::DeltaSource;
using plan::ForwardKernel;

// Runs the stages in order until one fails.
template <class... Stages>
cudaError_t in_order(Stages&&... stages) {
  cudaError_t error = cudaSuccess;
  ((error = error == cudaSuccess ? stages() : error), ...);
  return error;
}

template <class Element>
cudaError_t dq(const BackwardParams& p, const BackwardPlan& plan, cudaStream_t stream) {
  if (p.dq.data == nullptr) return cudaSuccess;
  return with_head_dim<Element>(plan.dq_head_dim,
                                [&](auto head_dim) { return backward_dq<Element, head_dim()>(p, plan, stream); });
}

template <class Element>
cudaError_t dkdv(const BackwardParams& p, const BackwardPlan& plan, cudaStream_t stream) {
  if (p.dk.data == nullptr && p.dv.data == nullptr) return cudaSuccess;
  return with_head_dim<Element>(plan.dkdv_head_dim,
                                [&](auto head_dim) { return backward_dkdv<Element, head_dim()>(p, plan, stream); });
}

// Computes the gradients of the current pairs from the materialised scores. dQ materialises 16-bit scores only, and
// only these are used for the bias gradient.
template <class Element>
cudaError_t with_materialised_scores(const BackwardParams& p, const BackwardPlan& plan, cudaStream_t stream) {
  const auto from_materialised = [&](MatrixGradient gradient) {
    return gradient_from_materialised<Element>(p, plan, gradient, stream);
  };
  const auto dq_last = [&] {
    return in_order([&] { return dkdv<Element>(p, plan, stream); },
                    [&] { return from_materialised(MatrixGradient::kDq); });
  };
  if constexpr (sizeof(Element) != 2) {
    return dq_last();
  } else {
    const auto dq_first = [&] {
      return in_order([&] { return dq<Element>(p, plan, stream); },
                      [&] { return p.dv.data ? from_materialised(MatrixGradient::kDv) : cudaSuccess; },
                      [&] { return p.dk.data ? from_materialised(MatrixGradient::kDk) : cudaSuccess; });
    };
    const bool has_dbias = plan.dbias == BiasGradientSource::kMaterialised;
    return in_order([&] { return plan.kernels == BackwardKernels::kMaterialiseInDkdv ? dq_last() : dq_first(); },
                    [&] { return has_dbias ? dbias_from_materialised<Element>(p, stream) : cudaSuccess; });
  }
}

// Computes dQ, dK and dV in several launches, each for some heads. The first kernel materialises P and dS for the next
// ones.
template <class Element>
cudaError_t in_launches(BackwardParams p, const BackwardPlan& plan, cudaStream_t stream) {
  const int64_t num_pairs = p.num_pairs;
  for (p.first_pair = 0; p.first_pair < num_pairs; p.first_pair += plan.materialised.pairs_per_launch) {
    p.num_pairs = std::min(plan.materialised.pairs_per_launch, num_pairs - p.first_pair);
    p.materialised.first_key_head = p.first_pair / p.batch;
    const cudaError_t error = with_materialised_scores<Element>(p, plan, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <class Element>
cudaError_t matrix_gradients(const BackwardParams& p, const BackwardPlan& plan, cudaStream_t stream) {
  switch (plan.kernels) {
    case BackwardKernels::kFused:
      if constexpr (sizeof(Element) == 2) return backward_fused<Element>(p, plan, stream);
      break;
    case BackwardKernels::kShortBias:
      if constexpr (sizeof(Element) == 2) return backward_short_bias<Element>(p, stream);
      break;
    case BackwardKernels::kBiasStationary:
      if constexpr (sizeof(Element) == 2) return backward_bias_stationary<Element>(p, plan, stream);
      break;
    case BackwardKernels::kMaterialiseInDkdv:
    case BackwardKernels::kMaterialiseInDq:
      if constexpr (!std::is_same_v<Element, tile::Tf32>) return in_launches<Element>(p, plan, stream);
      break;
    case BackwardKernels::kRecompute:  // dQ is first, because it may compute delta
      return in_order([&] { return dq<Element>(p, plan, stream); }, [&] { return dkdv<Element>(p, plan, stream); });
    default:
      break;
  }
  return cudaErrorInvalidValue;
}

cudaError_t compute_exact_delta(const BackwardParams& p, const BackwardPlan& plan, cudaStream_t stream) {
  return with_element(p.element, false, [&](auto element) { return exact_delta<decltype(element)>(p, plan, stream); });
}

cudaError_t compute_delta(BackwardParams p, const BackwardPlan& plan, cudaStream_t stream) {
  if (plan.dbias == BiasGradientSource::kRowSums) p.dlse = {};  // launch_dbias_from_rows subtracts it
  if (plan.exact_delta_of_sums) p.dalibi_slopes = nullptr;      // run_separate_sums computes their gradient
  if (plan.delta == DeltaSource::kExactKernel) return compute_exact_delta(p, plan, stream);
  return plan.delta == DeltaSource::kOwnKernel ? common::launch_delta(attention::delta_params(p), stream) : cudaSuccess;
}

cudaError_t run_tensor_cores(const BackwardParams& p, const BackwardPlan& plan, cudaStream_t stream) {
  return in_order(
      [&] {
        return with_element(p.element, plan.tf32,
                            [&](auto element) { return matrix_gradients<decltype(element)>(p, plan, stream); });
      },
      [&] { return p.dq_partials.present() ? common::sum_dq_partials(p, p.dq_partials, stream) : cudaSuccess; });
}

cudaError_t sum_dbias(const BackwardParams& p, const BackwardPlan& plan, cudaStream_t stream) {
  switch (plan.dbias) {
    case BiasGradientSource::kRecomputed:
      return with_element(p.element, false,
                          [&](auto element) { return dscore_sums<decltype(element)>(p, plan, stream); });
    case BiasGradientSource::kOverBatch:
      return run_dbias_over_batch(p, plan, stream);
    case BiasGradientSource::kRelative:
      return p.dbias_partials ? run_relative_dbias(p, plan, stream) : cudaSuccess;
    case BiasGradientSource::kRelativeOverBatch:
      return p.dbias_partials ? run_relative_dbias_over_batch(p, plan, stream) : cudaSuccess;
    default:
      return cudaSuccess;
  }
}

// Writes what the kernels read of a mask: its bits, or flags of its tiles.
template <class Plan>
cudaError_t scan_mask(attention::AttentionParams& p, const Plan& plan, void* workspace, cudaStream_t stream) {
  if (plan.workspace.mask_bits.present()) {
    return common::pack_short_mask(p, plan.workspace.mask_bits.template in<void>(workspace), stream);
  }
  return common::scan_mask_tiles(p, plan.workspace.mask_tiles.template in<uint8_t>(workspace), stream);
}

cudaError_t run_rows(const BackwardParams& p, const BackwardPlan& plan, cudaStream_t stream) {
  const bool recomputes_dbias = plan.dbias == BiasGradientSource::kRecomputed;
  return in_order(
      [&] { return p.dk.data || p.dv.data ? common::launch_dkdv_float64(p, stream) : cudaSuccess; },
      [&] { return p.dq.data ? common::launch_dq_float64(p, stream) : cudaSuccess; },
      [&] { return recomputes_dbias ? common::launch_dbias_float64(p, stream) : cudaSuccess; },
      [&] {
        return plan.dbias == BiasGradientSource::kRelative ? common::launch_relative_dbias_float64(p, stream)
                                                           : cudaSuccess;
      },
      [&] {
        return p.dalibi_slopes ? common::launch_dalibi_partials_float64(p, p.alibi_partials, stream) : cudaSuccess;
      },
      [&] { return p.dalibi_slopes ? common::launch_dalibi(p, p.alibi_partials, stream) : cudaSuccess; });
}

cudaError_t run_split(const attention::AppendingForwardParams& p, const ForwardPlan& plan, void* workspace,
                      cudaStream_t stream) {
  return with_element(p.element, /*tf32=*/false, [&](auto element) {
    using Element = std::conditional_t<sizeof(element) == 4, float, decltype(element)>;
    return with_head_dim<Element>(plan.head_dim, [&](auto head_dim) {
      constexpr int kRow = find_row(kSplitConfigs, sizeof(Element), head_dim(), ScoreMode::kScaleOnly);
      if constexpr (kSplitConfigs[kRow].head_dim == head_dim())
        return forward_split<Element, head_dim()>(p, plan, workspace, stream);
      return cudaErrorInvalidValue;
    });
  });
}

// Partial dQ has the layout of the LSE, with a row of dQ for each of its elements.
common::DqPartials dq_partials_of(const BackwardParams& p, const BackwardPlan& plan, void* workspace) {
  if (plan.dq_splits == 1) return {};
  const int64_t columns = common::dq_partial_columns(p.head_dim_qk);
  return {.sums = {.data = plan.workspace.dq_partials.in<void>(workspace),
                   .batch_stride = p.lse.batch_stride * columns,
                   .head_stride = p.lse.head_stride * columns,
                   .row_stride = columns,
                   .column_stride = 1},
          .stride = plan.workspace.dq_partials.bytes / plan.dq_splits / int64_t{sizeof(float)},
          .count = static_cast<int>(plan.dq_splits)};
}

common::AlibiPartials alibi_partials_of(const BackwardPlan& plan, void* workspace) {
  return {.data = plan.workspace.alibi_partials.in<void>(workspace), .per_head = plan.alibi_partials_per_head};
}

// Fills in the arguments that follow from the plan and its workspace.
BackwardParams kernel_params(const attention::BackwardParams& params, const BackwardPlan& plan, void* workspace) {
  BackwardParams p;
  static_cast<attention::BackwardParams&>(p) = params;
  p.delta = plan.workspace.delta.like(p.lse, workspace);
  p.delta_is_pending = plan.delta == DeltaSource::kSharedKernel;
  p.num_pairs = p.batch * p.num_heads_k;
  p.alibi_partials = alibi_partials_of(plan, workspace);
  p.dq_nan_flags = plan.workspace.dq_nan_flags.in<uint8_t>(workspace);
  p.dkdv_nan_flags = plan.workspace.dkdv_nan_flags.in<uint8_t>(workspace);
  p.dq_partials = dq_partials_of(p, plan, workspace);
  p.dbias_partials = plan.workspace.dbias_partials.in<float>(workspace);
  if (!plan.workspace.materialised_scores.present()) return p;
  p.materialised = {.ds = plan.workspace.materialised_scores.in<void>(workspace),
                    .rows_are_keys = plan.kernels == BackwardKernels::kMaterialiseInDkdv,
                    .rows = plan.materialised.rows,
                    .columns = plan.materialised.columns};
  if (!p.materialised.rows_are_keys)
    p.materialised.p = static_cast<char*>(p.materialised.ds) + plan.materialised.bytes_of_matrices;
  return p;
}

}  // namespace

cudaError_t run_forward(const attention::AppendingForwardParams& params, const ForwardPlan& plan, void* workspace,
                        cudaStream_t stream) {
  if (params.append.present() && plan.append_ctas == 0) {
    const cudaError_t error = common::append_kv(params.append, stream);
    if (error != cudaSuccess) return error;
  }
  if (plan::statistic_bytes(params) == 0) return cudaSuccess;  // no queries
  if (plan.kernel == ForwardKernel::kRows) return common::launch_forward_float64(params, stream);
  if (plan.kernel == ForwardKernel::kSplit) return run_split(params, plan, workspace, stream);
  ForwardParams p;
  static_cast<attention::ForwardParams&>(p) = params;
  p.nan_flags = plan.workspace.nan_flags.in<uint8_t>(workspace);
  return in_order([&] { return scan_mask(p, plan, workspace, stream); },
                  [&] {
                    return with_element(p.element, plan.tf32, [&](auto element) {
                      using Element = decltype(element);
                      if constexpr (sizeof(Element) == 2) {
                        if (plan.kernel == ForwardKernel::kWholeHeads) return forward_heads<Element>(p, plan, stream);
                        if (plan.kernel == ForwardKernel::kShortBias) return forward_short_bias<Element>(p, stream);
                        if (plan.kernel == ForwardKernel::kBiasStationary)
                          return forward_bias_stationary<Element>(p, plan, stream);
                      }
                      return with_head_dim<Element>(
                          plan.head_dim, [&](auto head_dim) { return forward<Element, head_dim()>(p, plan, stream); });
                    });
                  });
}

cudaError_t run_backward(const attention::BackwardParams& params, const BackwardPlan& plan, void* workspace,
                         cudaStream_t stream) {
  BackwardParams p = kernel_params(params, plan, workspace);
  return in_order(
      [&] { return scan_mask(p, plan, workspace, stream); }, [&] { return compute_delta(p, plan, stream); },
      [&] {
        return plan.dbias == BiasGradientSource::kRowSums ? common::launch_dbias_from_rows(p, stream) : cudaSuccess;
      },
      [&] {
        return plan.kernels == BackwardKernels::kRows ? run_rows(p, plan, stream) : run_tensor_cores(p, plan, stream);
      },
      [&] {
        return plan.kernels == BackwardKernels::kRows ? cudaSuccess : run_separate_sums(p, plan, workspace, stream);
      },
      [&] { return p.dsink ? common::launch_dsink(p, stream) : cudaSuccess; });
}

cudaError_t run_separate_sums(const attention::BackwardParams& params, const BackwardPlan& plan, void* workspace,
                              cudaStream_t stream) {
  BackwardParams p;
  static_cast<attention::BackwardParams&>(p) = params;
  p.delta = plan.workspace.delta.like(p.lse, workspace);
  p.alibi_partials = alibi_partials_of(plan, workspace);
  p.dbias_partials = plan.workspace.dbias_partials.in<float>(workspace);
  const bool recomputes = plan.exact_delta_of_sums || plan.dbias == BiasGradientSource::kRecomputed;
  const bool scans_mask = recomputes && !p.score_mod.mask_tiles.present();
  return in_order(
      [&] {
        auto* const tiles = plan.workspace.mask_tiles.in<uint8_t>(workspace);
        return scans_mask ? common::scan_mask_tiles(p, tiles, stream) : cudaSuccess;
      },
      [&] { return plan.exact_delta_of_sums ? compute_exact_delta(p, plan, stream) : cudaSuccess; },
      [&] { return p.dalibi_slopes ? common::launch_dalibi(p, p.alibi_partials, stream) : cudaSuccess; },
      [&] { return sum_dbias(p, plan, stream); });
}

cudaError_t run_tangents(const attention::TangentParams& params, const plan::TangentPlan& plan, cudaStream_t stream) {
  return with_element(params.element, /*tf32=*/false, [&](auto element) {
    using Element = std::conditional_t<sizeof(element) == 4, float, decltype(element)>;
    return with_head_dim<Element>(plan.head_dim, [&](auto head_dim) {
      if constexpr (has_tangent_kernel(sizeof(Element), head_dim())) {
        return tangents<Element, head_dim()>(params, plan, stream);
      }
      return cudaErrorInvalidValue;
    });
  });
}

}  // namespace flash_attn_ext::sm80
