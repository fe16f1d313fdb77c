// From products and dP to P and dS: the part that the dK/dV, dQ and dBias kernels share.
#pragma once

#include "kernels/score/score_tile.cuh"

namespace flash_attn_ext {

// LSE and delta of one query, as the gradient of its scores needs them.
struct alignas(8) QueryStatistics {
  // Times log2(e) where the scale is folded into the exponent (not Extended). +inf for a query that sees no key: its
  // probabilities vanish without a branch.
  float lse;
  float delta;
  float residual;
};

// From what the forward pass wrote, whose LSE is -inf where no key is seen.
template <bool kExtended>
__device__ __forceinline__ QueryStatistics query_statistics(float lse, float delta, float residual) {
  return {.lse = lse == -INFINITY ? INFINITY : lse * (kExtended ? 1.0f : kLog2e), .delta = delta, .residual = residual};
}

template <bool kExtended>
__device__ __forceinline__ QueryStatistics load_statistics(const attention::BackwardParams& p, const WorkItem& item,
                                                           int64_t query) {
  if (query >= item.sequence.num_queries) return {.lse = INFINITY, .delta = 0.0f, .residual = 0.0f};
  const int64_t row = item.sequence.query_begin + query;
  const float lse = *p.lse.at<const float>(item.sequence.batch, item.head, row);
  const float residual =
      p.lse_residual.present() ? *p.lse_residual.at<const float>(item.sequence.batch, item.head, row) : 0.0f;
  return query_statistics<kExtended>(lse, *p.delta.at<const float>(item.sequence.batch, item.head, row), residual);
}

// What the gradients accumulator ends as.
enum class GradientOf {
  kProduct,  // d loss / d (scale * q.k): the factor scale is left to whole rows of dQ and dK
  kScore,    // d loss / d score: what a bias receives
};

template <bool kExtendedValue, bool kPartialValue, GradientOf kOfValue>
struct Differentiation {
  static constexpr bool kExtended = kExtendedValue;
  static constexpr bool kPartial = kPartialValue;
  static constexpr GradientOf kOf = kOfValue;
};

// products -> P (as it multiplies dO, after dropout), gradients: dP -> dS. `statistics(r, column)` gives the query's.
template <class Kind, class Tile, class StatisticsOf>
__device__ __forceinline__ void differentiate(typename Tile::Accumulator& scores, typename Tile::Accumulator& gradients,
                                              const Tile& where, const TileTerms<typename Tile::Accumulator>& terms,
                                              StatisticsOf&& statistics) {
  using Acc = typename Tile::Accumulator;
  const attention::AttentionParams& p = where.p;
  if constexpr (!Kind::kExtended) {
    uint32_t visible[Acc::kThreadRows] = {};  // of partial tiles
    if constexpr (Kind::kPartial) {
      const VisibleColumns<Acc> columns = where.visible();
#pragma unroll
      for (int r = 0; r < Acc::kThreadRows; ++r) visible[r] = columns.of_row(r);
    }
    const float scale_log2e = static_cast<float>(p.score_mod.scale) * kLog2e;
    for_each_element<Acc>([&](int r, int, int j, int e, int column) {
      const QueryStatistics query = statistics(r, column);
      const float probability = ptx::exp2(scores.at(r, j, e) * scale_log2e - query.lse);
      const float gradient = probability * (gradients.at(r, j, e) - query.delta);
      // Chosen, not multiplied by 0: a NaN in a query's LSE, delta or dP must not reach what the query does not attend.
      const bool hidden = Kind::kPartial && !VisibleColumns<Acc>::is_visible(visible[r], j, e);
      scores.at(r, j, e) = hidden ? 0.0f : probability;
      gradients.at(r, j, e) = hidden ? 0.0f : gradient;
    });
    return;
  }
  typename Tile::KeepBits keep = {};
  const float rescale = static_cast<float>(p.dropout.rescale);
  if (p.dropout.enabled()) {
    keep = where.keep_bits();
    for_each_element<Acc>([&](int r, int, int j, int e, int) {
      gradients.at(r, j, e) = keep.at(r, j, e) ? gradients.at(r, j, e) * rescale : 0.0f;
    });
  }
  where.cap(scores);
  for_each_element<Acc>(
      [&](int r, int, int j, int e, int column) { gradients.at(r, j, e) -= statistics(r, column).delta; });
  if (Kind::kOf == GradientOf::kProduct && p.score_mod.softcap != 0.0) {
    const auto transform = p.score_mod.transform<float, DeviceMath>();
    for_each_element<Acc>(
        [&](int r, int, int j, int e, int) { gradients.at(r, j, e) *= transform.cap_derivative(scores.at(r, j, e)); });
  }
  where.add_terms(scores, terms);
  if constexpr (Kind::kPartial) where.hide_invisible(scores);
  for_each_element<Acc>([&](int r, int, int j, int e, int column) {
    const QueryStatistics query = statistics(r, column);
    // The difference comes first: scores may be as low as the smallest finite number.
    const float exponential = ptx::exp2(((scores.at(r, j, e) - query.lse) - query.residual) * kLog2e);
    const float probability = scores.at(r, j, e) == -INFINITY ? 0.0f : exponential;
    scores.at(r, j, e) = probability;
    // dP of what nobody attends may be NaN.
    gradients.at(r, j, e) = probability == 0.0f ? 0.0f : probability * gradients.at(r, j, e);
  });
  if (p.dropout.enabled()) {
    for_each_element<Acc>(
        [&](int r, int, int j, int e, int) { scores.at(r, j, e) *= keep.at(r, j, e) ? rescale : 0.0f; });
  }
}

}  // namespace flash_attn_ext
