// From products and dP to P and dS, as score_gradient.cuh does, with a bias and a mask that are staged.
#pragma once

#include "kernels/score/bias_mask.cuh"
#include "kernels/score/score_gradient.cuh"

namespace flash_attn_ext {

// products -> P, gradients: dP -> dS (d loss / d (scale * q.k), without the scale). Statistics as of an Extended
// kernel. What is hidden is set to 0, not multiplied by it: a NaN in what nobody attends must not reach P or dS.
template <bool kPartial, class Tile, class Terms>
__device__ __forceinline__ void differentiate_staged(
    typename Tile::Accumulator& scores, typename Tile::Accumulator& gradients, const Tile& where, const Terms& terms,
    bool masked, const QueryStatistics (&statistics)[Tile::Accumulator::kThreadRows]) {
  using Acc = typename Tile::Accumulator;
  const float scale = static_cast<float>(where.p.score_mod.scale);
  const auto hide = [&](int r, int j, int e) {
    scores.at(r, j, e) = 0.0f;
    gradients.at(r, j, e) = 0.0f;
  };
  if (Terms::stages(where.p.score_mod.bias)) {
    terms.for_each_bias([&](int r, int j, float low, float high) {
      const QueryStatistics& query = statistics[r];
      const float residual = query.residual * kLog2e;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float bias = e == 0 ? low : high;
        // The difference comes first: scores may be as low as the smallest finite number.
        const float above = fmaf(scores.at(r, j, e), scale, bias) - query.lse;
        scores.at(r, j, e) = ptx::exp2(above * kLog2e - residual);
        gradients.at(r, j, e) = scores.at(r, j, e) * (gradients.at(r, j, e) - query.delta);
        if (bias == -INFINITY) hide(r, j, e);
      }
    });
  } else {
    for_each_element<Acc>([&](int r, int, int j, int e, int) {
      const QueryStatistics& query = statistics[r];
      scores.at(r, j, e) = ptx::exp2(scores.at(r, j, e) * (scale * kLog2e) - query.lse * kLog2e);
      gradients.at(r, j, e) = scores.at(r, j, e) * (gradients.at(r, j, e) - query.delta);
    });
  }
  if (masked) terms.for_each_masked(hide);
  if constexpr (kPartial) {
    where.for_each_visibility([&](int r, int j, int e, bool visible) {
      if (!visible) hide(r, j, e);
    });
  }
}

}  // namespace flash_attn_ext
