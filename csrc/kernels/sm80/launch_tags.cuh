// Which instantiation of a kernel a call takes.
#pragma once

#include "kernels/dispatch.h"
#include "kernels/tile_config.h"

namespace flash_attn_ext::sm80 {

template <Variant kVariant>
using VariantTag = std::integral_constant<Variant, kVariant>;

// Sequences of so few queries fill the smaller tiles of an Extended kernel, where it has some. It can do everything.
inline constexpr int64_t kFewQueries = 64;

// A bias in the 16-bit type of q, a mask, or both, and nothing else that changes a score.
inline bool adds_terms(const attention::AttentionParams& p) {
  const attention::BroadcastView& bias = p.score_mod.bias;
  const bool adds_float32 = bias.present() && bias.element == attention::ElementType::kFloat32;
  return scales_up_and_adds(p) && !only_scales_up(p) && !adds_float32 && !p.dropout.enabled();
}

// Calls function(variant) for a call's forward kernel. Variants exist for the head dims and types that are used most:
// each takes time to compile.
template <class Element, int kHeadDim, class Function>
cudaError_t with_forward_variant(const attention::ForwardParams& p, Function&& function) {
  const bool drops = p.dropout.enabled();
  if constexpr (sizeof(Element) == 2 && (kHeadDim == 64 || kHeadDim == 128)) {
    if (only_scales_up(p) && drops) return function(VariantTag<Variant::kDropout>{});
    if (adds_terms(p)) return function(VariantTag<Variant::kTerms>{});
  }
  if (only_scales_up(p) && !drops) {
    if constexpr (sizeof(Element) == 2 && kHeadDim == 64) {
      const int64_t short_queries = p.visibility.one_sided() ? kShortCausalQueries : kShortForwardQueries;
      if (p.sequences.max_seqlen_q <= short_queries) return function(VariantTag<Variant::kShort>{});
    }
    constexpr bool kSmaller = forward_tile(sizeof(Element), kHeadDim, Variant::kExtended).queries <
                              forward_tile(sizeof(Element), kHeadDim, Variant::kPlain).queries;
    if (!kSmaller || p.sequences.max_seqlen_q > kFewQueries) return function(VariantTag<Variant::kPlain>{});
  }
  return function(VariantTag<Variant::kExtended>{});
}

// What the backward pass has kernels for throughout.
inline Variant backward_variant(const attention::BackwardParams& p) {
  const bool plain = only_scales_up(p) && !p.dropout.enabled() && p.sequences.max_seqlen_q > kFewQueries;
  return plain ? Variant::kPlain : Variant::kExtended;
}

// The same as a tag, for function(variant).
template <class Function>
cudaError_t with_backward_variant(const attention::BackwardParams& p, Function&& function) {
  if (backward_variant(p) == Variant::kPlain) return function(VariantTag<Variant::kPlain>{});
  return function(VariantTag<Variant::kExtended>{});
}

// The same for a dQ kernel.
template <class Element, int kHeadDim, class Function>
cudaError_t with_dq_variant(const attention::BackwardParams& p, Function&& function) {
  if constexpr (sizeof(Element) == 2 && (kHeadDim == 64 || kHeadDim == 128)) {
    if (adds_terms(p)) return function(VariantTag<Variant::kTerms>{});
  }
  return with_backward_variant(p, function);
}

}  // namespace flash_attn_ext::sm80
