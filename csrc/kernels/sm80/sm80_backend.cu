#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "kernels/common/float64_attention.h"
#include "kernels/common/mask_tiles.h"
#include "kernels/common/score_gradients.h"
#include "kernels/dispatch.h"
#include "kernels/sm80/sm80_backend.h"
#include "kernels/sm80/sm80_kernels.h"
#include "kernels/sm80/spill_plan.h"
#include "tile/copy_rows.h"
#include "tile/element.h"

namespace flash_attn_ext::sm80 {
namespace {

// Single TF32 products are allowed, never asked for: kernels exist where they are used most.
constexpr int kLargestTf32HeadDim = 128;
bool rounds_to_tf32(const attention::AttentionParams& p) {
  return p.allow_tf32 && std::max(p.head_dim_qk, p.head_dim_v) <= kLargestTf32HeadDim;
}

template <class Function>
cudaError_t with_element(const attention::AttentionParams& p, Function&& function) {
  switch (p.element) {
    case attention::ElementType::kBFloat16:
      return function(__nv_bfloat16{});
    case attention::ElementType::kFloat16:
      return function(__half{});
    case attention::ElementType::kFloat32:
      return rounds_to_tf32(p) ? function(tile::Tf32{}) : function(float{});
    default:  // float64 has kernels of its own
      return cudaErrorInvalidValue;
  }
}

// Calls stage(bucket) for the head dims.
template <class Element, class Stage>
cudaError_t for_head_dim(const attention::AttentionParams& p, Stage&& stage) {
  constexpr int kLargest = std::is_same_v<Element, tile::Tf32> ? kLargestTf32HeadDim : 512;
  return with_head_dim<sizeof(Element), kLargest>(std::max(p.head_dim_qk, p.head_dim_v), stage);
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

// Whether bytes between rows are 32-bit numbers as far as a tile goes.
bool has_short_strides(const attention::AttentionParams& p) {
  return std::max({p.q.row_stride, p.k.row_stride, p.v.row_stride}) < tile::kLongStride;
}

// Whether blocks go through whole heads, which needs all of their keys at once. Fewer queries fill smaller tiles.
bool takes_heads_kernel(const attention::ForwardParams& p) {
  constexpr int64_t kHeadDim = 64;  // of the kernel, without a tail
  const attention::SequenceTable& lengths = p.sequences;
  return only_scales_up(p) && !p.dropout.enabled() && p.visibility.unlimited() && lengths.cu_seqlens_q == nullptr &&
         p.head_dim_qk == kHeadDim && p.head_dim_v == kHeadDim && has_short_strides(p) &&
         lengths.max_seqlen_q > kShortForwardQueries && lengths.max_seqlen_q <= kHeadsRows &&
         lengths.max_seqlen_k >= kHeadsKeys && lengths.max_seqlen_k <= kHeadsRows;
}

// Whether one kernel computes dK, dV and dQ. Without keys it would have no blocks, and dQ would not be written.
bool takes_short_kernel(const attention::BackwardParams& p) {
  const attention::SequenceTable& lengths = p.sequences;
  const bool wanted = p.dq.data && (p.dk.data || p.dv.data);
  // One block walks all heads of a group.
  const bool fills_gpu = p.queries_per_key_head() == 1 || p.num_pairs >= kShortBackwardPairs;
  return wanted && fills_gpu && only_scales_up(p) && !p.dropout.enabled() &&
         std::max(p.head_dim_qk, p.head_dim_v) <= kShortBackwardHeadDim &&
         lengths.max_seqlen_q <= kShortBackwardQueries && lengths.max_seqlen_k <= kShortBackwardKeys &&
         lengths.max_seqlen_k > 0;
}

// dK, dV and dQ with P and dS computed in both kernels. dQ comes first: it may compute delta.
template <class Element>
cudaError_t recompute(const attention::BackwardParams& p, cudaStream_t stream) {
  return in_order([&] { return p.dq.data ? dq<Element>(p, stream) : cudaSuccess; },
                  [&] { return p.dk.data || p.dv.data ? dkdv<Element>(p, stream) : cudaSuccess; });
}

// Whether kept scores are all that the bias's gradient needs: it is not more precise than they are, it has no sum over
// rows, in which their rounding would add up, and dS is that of the score itself. There are kernels for 16-bit scores.
bool dbias_is_kept(const attention::BackwardParams& p) {
  return attention::is_16_bit(p.element) && p.score_mod.bias.element != attention::ElementType::kFloat32 &&
         p.dbias.per_query && p.dbias.per_key && p.score_mod.softcap == 0.0;
}

// Whether each launch holds all heads and batch entries that any element of dBias sums.
bool holds_sums_of_dbias(const attention::BackwardParams& p, const SpillPlan& plan) {
  const bool over_heads = !p.dbias.per_head && p.num_heads_k > 1;
  const bool over_batch = !p.dbias.per_batch && p.batch > 1;
  return plan.pairs >= p.batch * p.num_heads_k || (!over_heads && (!over_batch || plan.pairs % p.batch == 0));
}

// Whether the scores of one kernel are kept for others.
bool keeps_scores(const attention::BackwardParams& p) {
  return p.spill.ds != nullptr && plan_spill(p).order != SpillPlan::Order::kRecompute;
}

// The pairs at work. 16-bit scores alone are kept in either order, and for the bias's gradient.
template <class Element>
cudaError_t with_kept_scores(const attention::BackwardParams& p, bool keys_first, cudaStream_t stream) {
  const auto for_dq = [&] {
    return in_order([&] { return dkdv<Element>(p, stream); }, [&] { return dq_from_spill<Element>(p, stream); });
  };
  if constexpr (sizeof(Element) != 2) {
    return for_dq();
  } else {
    const auto for_dk_and_dv = [&] {
      return in_order([&] { return dq<Element>(p, stream); },
                      [&] { return p.dv.data ? dv_from_spill<Element>(p, stream) : cudaSuccess; },
                      [&] { return p.dk.data ? dk_from_spill<Element>(p, stream) : cudaSuccess; });
    };
    const bool kept_dbias = p.dbias.present() && dbias_is_kept(p);
    return in_order([&] { return keys_first ? for_dq() : for_dk_and_dv(); },
                    [&] { return kept_dbias ? dbias_from_spill<Element>(p, stream) : cudaSuccess; });
  }
}

// dK, dV and dQ with the first kernel's scores kept for the second, some heads after the others.
template <class Element>
cudaError_t reuse(attention::BackwardParams p, const SpillPlan& plan, cudaStream_t stream) {
  const bool keys_first = plan.order == SpillPlan::Order::kKeysFirst;
  p.spill.rows_are_keys = keys_first;
  p.spill.rows = plan.rows;
  p.spill.columns = plan.columns;
  if (!keys_first) p.spill.p = static_cast<char*>(p.spill.ds) + plan.matrix_bytes;
  const int64_t num_pairs = p.num_pairs;
  for (p.first_pair = 0; p.first_pair < num_pairs; p.first_pair += plan.pairs) {
    p.num_pairs = std::min(plan.pairs, num_pairs - p.first_pair);
    p.spill.first_key_head = p.first_pair / p.batch;
    const cudaError_t error = with_kept_scores<Element>(p, keys_first, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <class Element>
cudaError_t backward_matrices(const attention::BackwardParams& p, cudaStream_t stream) {
  if constexpr (sizeof(Element) == 2) {
    if (takes_short_kernel(p)) return backward_short<Element>(p, stream);
  }
  if constexpr (!std::is_same_v<Element, tile::Tf32>) {
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

// Sums of dS over rows cancel; what a rounded O leaves in delta does not. Nor does it in the gradient of a bias that is
// more precise than O.
bool needs_exact_delta(const attention::BackwardParams& p) {
  const bool dbias_is_exact = p.dbias.present() && (!(p.dbias.per_query && p.dbias.per_key) ||
                                                    p.score_mod.bias.element == attention::ElementType::kFloat32);
  return attention::is_16_bit(p.element) && (dbias_is_exact || p.dalibi_slopes || p.dsink);
}

// Whether rows are made of whole pieces of 16 bytes.
bool has_whole_chunks(const attention::MatrixView& view, int64_t columns, int64_t chunk) {
  const int64_t strides = view.batch_stride | view.head_stride | view.row_stride;  // chunk is a power of 2
  return view.column_stride == 1 && (strides | columns) % chunk == 0 &&
         reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
}

template <class Element>
cudaError_t run_backward(const attention::BackwardParams& p, cudaStream_t stream) {
  const bool exact_delta = needs_exact_delta(p);
  const bool dbias_is_left = p.dbias.present() && !(keeps_scores(p) && dbias_is_kept(p));
  // What is summed over rows is not rounded to TF32, however much that is allowed.
  using Summed = std::conditional_t<std::is_same_v<Element, tile::Tf32>, float, Element>;
  return in_order([&] { return exact_delta ? backward_delta<Summed>(p, stream) : cudaSuccess; },
                  [&] { return backward_matrices<Element>(p, stream); },
                  [&] { return dbias_is_left ? backward_dbias<Summed>(p, stream) : cudaSuccess; },
                  [&] { return p.dalibi_slopes ? backward_dalibi<Summed>(p, stream) : cudaSuccess; });
}

}  // namespace

int64_t max_head_dim(attention::ElementType element) { return attention::is_16_bit(element) ? 512 : 256; }

int64_t spill_bytes(const attention::BackwardParams& params) { return plan_spill(params).bytes(); }

bool computes_delta(const attention::BackwardParams& params) {
  if (params.element == attention::ElementType::kFloat64 || params.dq.data == nullptr) return false;
  if (needs_exact_delta(params) || plan_spill(params).order == SpillPlan::Order::kKeysFirst) return false;
  const int64_t chunk = attention::is_16_bit(params.element) ? 8 : 4;
  return has_whole_chunks(params.out, params.head_dim_v, chunk) &&
         has_whole_chunks(params.dout, params.head_dim_v, chunk);
}

bool writes_dbias_once(const attention::BackwardParams& params) {
  if (params.element == attention::ElementType::kFloat64) return false;
  if (params.sequences.max_seqlen_q == 0 || params.sequences.max_seqlen_k == 0) return false;  // a grid without blocks
  if (!dbias_is_kept(params)) return true;
  const SpillPlan plan = plan_spill(params);
  return plan.order == SpillPlan::Order::kRecompute || holds_sums_of_dbias(params, plan);
}

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
                      if constexpr (sizeof(Element) == 2) {
                        if (takes_heads_kernel(p)) return forward_heads<Element>(p, stream);
                      }
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
