#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "kernels/common/float64_attention.h"
#include "kernels/common/mask_tiles.h"
#include "kernels/common/score_gradients.h"
#include "kernels/dispatch.h"
#include "kernels/sm80/sm80_backend.h"
#include "kernels/sm80/sm80_kernels.h"
#include "kernels/sm80/spill_plan.h"
#include "tile/element.h"

namespace flash_attn_ext::sm80 {
namespace {

template <class Function>
cudaError_t with_element(const attention::AttentionParams& p, Function&& function) {
  switch (p.element) {
    case attention::ElementType::kBFloat16:
      return function(__nv_bfloat16{});
    case attention::ElementType::kFloat16:
      return function(__half{});
    case attention::ElementType::kFloat32:
      return p.allow_tf32 ? function(tile::Tf32{}) : function(float{});
    default:  // float64 has kernels of its own
      return cudaErrorInvalidValue;
  }
}

// Calls stage(bucket) for the head dims.
template <class Element, class Stage>
cudaError_t for_head_dim(const attention::AttentionParams& p, Stage&& stage) {
  return with_head_dim<sizeof(Element)>(std::max(p.head_dim_qk, p.head_dim_v), stage);
}
template <class Element>
cudaError_t dkdv(const attention::BackwardParams& p, cudaStream_t stream) {
  return for_head_dim<Element>(p, [&](auto head_dim) { return backward_dkdv<Element, head_dim()>(p, stream); });
}
template <class Element>
cudaError_t dq(const attention::BackwardParams& p, cudaStream_t stream) {
  return for_head_dim<Element>(p, [&](auto head_dim) { return backward_dq<Element, head_dim()>(p, stream); });
}

// The stages in order, as far as the ones before succeeded.
template <class... Stages>
cudaError_t in_order(Stages&&... stages) {
  cudaError_t error = cudaSuccess;
  ((error = error == cudaSuccess ? stages() : error), ...);
  return error;
}

// Fills the table of the mask's tiles, where there is memory for it.
cudaError_t look_mask_over(attention::AttentionParams& p, cudaStream_t stream) {
  if (!p.score_mod.mask_tiles.present()) return cudaSuccess;
  p.score_mod.mask_tiles = common::mask_tiles_in(p.score_mod.mask_tiles.data, p);
  return common::launch_mask_tiles(p, stream);
}

// dK, dV and dQ with P and dS computed in both kernels.
template <class Element>
cudaError_t recompute(const attention::BackwardParams& p, cudaStream_t stream) {
  return in_order([&] { return p.dk.data || p.dv.data ? dkdv<Element>(p, stream) : cudaSuccess; },
                  [&] { return p.dq.data ? dq<Element>(p, stream) : cudaSuccess; });
}

// Whether kept scores are all that the bias's gradient needs: it has no sum over rows, in which their rounding would
// add up, and dS is that of the score itself.
bool dbias_is_kept(const attention::BackwardParams& p) {
  return p.dbias.present() && p.dbias.per_query && p.dbias.per_key && p.score_mod.softcap == 0.0;
}

// Whether the scores of one kernel are kept for others.
bool keeps_scores(const attention::BackwardParams& p) {
  return p.spill.ds != nullptr && plan_spill(p).order != SpillPlan::Order::kRecompute;
}

// dK, dV and dQ with the first kernel's scores kept for the second, some heads after the others.
template <class Element>
cudaError_t reuse(attention::BackwardParams p, const SpillPlan& plan, cudaStream_t stream) {
  p.spill.rows = plan.rows;
  p.spill.columns = plan.columns;
  const bool keys_first = plan.order == SpillPlan::Order::kKeysFirst;
  if (!keys_first) p.spill.p = static_cast<char*>(p.spill.ds) + plan.matrix_bytes;
  const int64_t num_pairs = p.num_pairs;
  for (p.first_pair = 0; p.first_pair < num_pairs; p.first_pair += plan.pairs) {
    p.num_pairs = std::min(plan.pairs, num_pairs - p.first_pair);
    const cudaError_t error =
        in_order([&] { return keys_first ? dkdv<Element>(p, stream) : dq<Element>(p, stream); },
                 [&] { return keys_first ? dq_from_spill<Element>(p, stream) : cudaSuccess; },
                 [&] { return !keys_first && p.dv.data ? dv_from_spill<Element>(p, stream) : cudaSuccess; },
                 [&] { return !keys_first && p.dk.data ? dk_from_spill<Element>(p, stream) : cudaSuccess; },
                 [&] { return dbias_is_kept(p) ? dbias_from_spill<Element>(p, stream) : cudaSuccess; });
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <class Element>
cudaError_t backward_matrices(const attention::BackwardParams& p, cudaStream_t stream) {
  if constexpr (sizeof(Element) == 2) {
    if (keeps_scores(p)) return reuse<Element>(p, plan_spill(p), stream);
  }
  return recompute<Element>(p, stream);
}

cudaError_t run_backward_float64(const attention::BackwardParams& p, cudaStream_t stream) {
  return in_order([&] { return p.dk.data || p.dv.data ? common::launch_dkdv_float64(p, stream) : cudaSuccess; },
                  [&] { return p.dq.data ? common::launch_dq_float64(p, stream) : cudaSuccess; },
                  [&] { return p.dbias.present() ? common::launch_dbias_float64(p, stream) : cudaSuccess; },
                  [&] { return p.dalibi_slopes ? common::launch_dalibi_partials_float64(p, stream) : cudaSuccess; });
}

template <class Element>
cudaError_t run_backward(const attention::BackwardParams& p, cudaStream_t stream) {
  // Sums of dS over rows cancel; what a rounded O leaves in delta does not.
  const bool dbias_sums_rows = p.dbias.present() && !(p.dbias.per_query && p.dbias.per_key);
  const bool exact_delta = sizeof(Element) == 2 && (dbias_sums_rows || p.dalibi_slopes || p.dsink);
  const bool dbias_is_left = p.dbias.present() && !(keeps_scores(p) && dbias_is_kept(p));
  return in_order([&] { return exact_delta ? backward_delta<Element>(p, stream) : cudaSuccess; },
                  [&] { return backward_matrices<Element>(p, stream); },
                  [&] { return dbias_is_left ? backward_dbias<Element>(p, stream) : cudaSuccess; },
                  [&] { return p.dalibi_slopes ? backward_dalibi<Element>(p, stream) : cudaSuccess; });
}

}  // namespace

int64_t max_head_dim(attention::ElementType element) {
  const bool half = element == attention::ElementType::kBFloat16 || element == attention::ElementType::kFloat16;
  return half ? 512 : 256;
}

int64_t spill_bytes(const attention::BackwardParams& params) { return plan_spill(params).bytes(); }

int64_t mask_tile_bytes(const attention::AttentionParams& params) {
  if (!params.score_mod.mask.present() || params.element == attention::ElementType::kFloat64) return 0;
  return common::count_mask_tiles(params).total();
}

cudaError_t run_forward(const attention::ForwardParams& params, cudaStream_t stream) {
  if (params.element == attention::ElementType::kFloat64) return common::launch_forward_float64(params, stream);
  attention::ForwardParams p = params;
  return in_order([&] { return look_mask_over(p, stream); },
                  [&] {
                    return with_element(p, [&](auto element) {
                      using Element = decltype(element);
                      return for_head_dim<Element>(
                          p, [&](auto head_dim) { return forward<Element, head_dim()>(p, stream); });
                    });
                  });
}

cudaError_t run_backward(const attention::BackwardParams& params, cudaStream_t stream) {
  attention::BackwardParams p = params;
  return in_order([&] { return look_mask_over(p, stream); },
                  [&] {
                    if (p.element == attention::ElementType::kFloat64) return run_backward_float64(p, stream);
                    return with_element(p, [&](auto element) { return run_backward<decltype(element)>(p, stream); });
                  },
                  [&] { return p.dalibi_slopes ? common::launch_dalibi(p, stream) : cudaSuccess; },
                  [&] { return p.dsink ? common::launch_dsink(p, stream) : cudaSuccess; });
}

}  // namespace flash_attn_ext::sm80
