// Turns q.k and dP into P and dS. The dK/dV, dQ and dBias kernels share this.
#pragma once

#include "kernels/score/dropout.cuh"
#include "kernels/score/score_mod.cuh"

namespace flash_attn_ext {

// LSE and delta of one query, in the form that the gradient of its scores needs.
struct alignas(8) QueryStatistics {
  // The LSE, times log2(e) where scores are only scaled. It is +inf for a query that sees no key, so that the query's
  // probabilities are 0 without a branch.
  float lse;
  float delta;
  float residual;  // times log2(e)
};

// Converts the statistics of the forward pass, whose LSE is -inf where a query sees no key.
template <bool kHasBiasOrMask>
__device__ __forceinline__ QueryStatistics query_statistics(float lse, float delta, float residual) {
  return {.lse = lse == -INFINITY ? INFINITY : lse * (kHasBiasOrMask ? 1.0f : kLog2e),
          .delta = delta,
          .residual = residual * kLog2e};
}

template <bool kHasBiasOrMask>
__device__ __forceinline__ QueryStatistics load_statistics(const attention::BackwardParams& p, const HeadCoord& coord,
                                                           int64_t query) {
  if (query >= coord.sequence.num_queries) return {.lse = INFINITY, .delta = 0.0f, .residual = 0.0f};
  const int64_t row = coord.sequence.query_begin + query;
  const float lse = *p.lse.at<const float>(coord.sequence.batch, coord.head, row);
  const float residual =
      p.lse_residual.present() ? *p.lse_residual.at<const float>(coord.sequence.batch, coord.head, row) : 0.0f;
  return query_statistics<kHasBiasOrMask>(lse, *p.delta.at<const float>(coord.sequence.batch, coord.head, row),
                                          residual);
}

// What the accumulator of gradients holds at the end.
enum class GradientOf {
  kProduct,  // d loss / d (scale * q.k): the factor scale is applied to whole rows of dQ and dK
  kScore,    // d loss / d score: the gradient of a bias
};

// kGeneric: any feature may change a score; otherwise only a bias or mask.
template <bool kGenericValue, bool kPartialValue, GradientOf kOfValue>
struct Differentiation {
  static constexpr bool kGeneric = kGenericValue;
  static constexpr bool kPartial = kPartialValue;
  static constexpr GradientOf kOf = kOfValue;
};

// Turns `scores` from q.k into P, and `gradients` from dP into dS. It is for scores that are only scaled, by a positive
// factor that is folded into the exponent. `statistics(r, column)` returns those of the query.
template <bool kPartial, class Tile>
__device__ __forceinline__ void differentiate_scaled(typename Tile::Accumulator& scores,
                                                     typename Tile::Accumulator& gradients, const Tile& where,
                                                     auto&& statistics) {
  using Acc = typename Tile::Accumulator;
  typename Tile::Visible::Row visible[Acc::kThreadRows] = {};  // of masked tiles
  if constexpr (kPartial) {
    const typename Tile::Visible columns = where.visible();
#pragma unroll
    for (int r = 0; r < Acc::kThreadRows; ++r) visible[r] = Tile::visible_row(columns, r);
  }
  const float scale_log2e = static_cast<float>(where.p.score_mod.scale) * kLog2e;
  for_each_element<Acc>([&](int r, int, int j, int e, int column) {
    const QueryStatistics query = statistics(r, column);
    const float probability = ptx::exp2(scores.at(r, j, e) * scale_log2e - query.lse);
    const float gradient = probability * (gradients.at(r, j, e) - query.delta);
    // Selects 0 instead of multiplying by it: a NaN in a query's LSE, delta or dP must not reach keys that the query
    // does not attend to.
    const bool hidden = kPartial && !visible[r].is_visible(j, e);
    scores.at(r, j, e) = hidden ? 0.0f : probability;
    gradients.at(r, j, e) = hidden ? 0.0f : gradient;
  });
}

// The same for scores with a bias, a mask or other changes. Where the gradients are those of q.k, P is returned after
// dropout, as a factor of dO. Masked elements are set to 0 at the end, since they may be NaN until then. The gradient
// of a weight of 0 is also set to 0.
template <class Kind, class Tile>
__device__ __forceinline__ void differentiate(typename Tile::Accumulator& scores, typename Tile::Accumulator& gradients,
                                              const Tile& where, const auto& bias_mask, bool masked,
                                              auto&& statistics) {
  using Acc = typename Tile::Accumulator;
  const attention::ScoreMod& mod = where.p.score_mod;
  const attention::Dropout& dropout = where.p.dropout;
  const bool drops = Kind::kGeneric && dropout.enabled();
  const auto rescale = static_cast<float>(dropout.rescale);
  KeptWeights<Tile> kept;
  float factor = static_cast<float>(mod.scale);  // of the accumulator's scores
  if constexpr (Kind::kGeneric) {
    if (drops) {
      kept.draw(where);
      kept.apply(gradients, rescale);
    }
    for_each_element<Acc>(
        [&](int r, int, int j, int e, int column) { gradients.at(r, j, e) -= statistics(r, column).delta; });
    if (changes_before_bias(mod)) {
      cap(scores, mod);
      if constexpr (Kind::kOf == GradientOf::kProduct) cap_backward(gradients, scores, mod);
      add_alibi(scores, where);
      factor = 1.0f;
    }
  }
  const auto weigh = [&](int r, int j, int e, const QueryStatistics& query, float exponent) {
    const float probability = ptx::exp2(exponent);
    const float gradient = Kind::kGeneric ? gradients.at(r, j, e) : gradients.at(r, j, e) - query.delta;
    scores.at(r, j, e) = probability;
    gradients.at(r, j, e) = probability == 0.0f ? 0.0f : probability * gradient;
  };
  const auto hide = [&](int r, int j, int e) {
    scores.at(r, j, e) = 0.0f;
    gradients.at(r, j, e) = 0.0f;
  };
  if (mod.bias.present()) {
    bias_mask.template for_each_bias<Kind::kGeneric>(where, [&](int r, int j, float low, float high) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float bias = e == 0 ? low : high;
        const QueryStatistics query = statistics(r, Acc::column(j, e));
        // Subtracts first, since scores may be as low as the smallest finite number.
        const float above = fmaf(scores.at(r, j, e), factor, bias) - query.lse;
        weigh(r, j, e, query, above * kLog2e - query.residual);
        if (bias == -INFINITY) hide(r, j, e);
      }
    });
  } else {
    for_each_element<Acc>([&](int r, int, int j, int e, int column) {
      const QueryStatistics query = statistics(r, column);
      const float score = scores.at(r, j, e);
      // ALiBi may have lowered the score that far, too.
      weigh(r, j, e, query,
            Kind::kGeneric ? fmaf(score, factor, -query.lse) * kLog2e : score * (factor * kLog2e) - query.lse * kLog2e);
    });
  }
  if (masked) bias_mask.for_each_masked(hide);
  if constexpr (Kind::kPartial) {
    where.for_each_visibility([&](int r, int j, int e, bool visible) {
      if (!visible) hide(r, j, e);
    });
  }
  if (drops && Kind::kOf == GradientOf::kProduct) kept.apply(scores, rescale);
}

}  // namespace flash_attn_ext
