// The online softmax of a warp's rows: the algorithm of attention/online_softmax.h, with the elements of a row spread
// over four threads.
#pragma once

#include "attention/online_softmax.h"
#include "ptx/math.h"
#include "tile/accumulator.h"

namespace flash_attn_ext {

// How scores become exponents of 2. Where scores are only scaled, exp(scale (x - m)) = 2^(c x - c m) is one FMA. Other
// scores may be as low as the smallest finite number, so m is subtracted first.
struct Exponent {
  bool folded;  // whether c contains the scale
  float c;
};

template <int kThreadRows>
struct OnlineSoftmax {
  float m[kThreadRows];  // row maximum: of q.k where the scale is folded into the exponent, else of final scores
  float l[kThreadRows];  // this thread's share of the sum of exp

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      m[r] = -INFINITY;
      l[r] = 0.0f;
    }
  }

  // scores -> P; updates m, l and out. Few tiles raise a row maximum. With kAsksFirst, a vote of the warp decides
  // whether any did, and otherwise `out` is not rescaled.
  template <bool kAsksFirst, class Scores, class Output>
  __device__ __forceinline__ void update(Scores& scores, Output& out, const Exponent& exponent) {
    float raised[kThreadRows];
    bool any_above_threshold = !kAsksFirst;
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      float tile_max = scores.at(r, 0, 0);
#pragma unroll
      for (int j = 0; j < Scores::kColumnTiles; ++j) {
        tile_max = fmaxf(tile_max, fmaxf(scores.at(r, j, 0), scores.at(r, j, 1)));
      }
      raised[r] = fmaxf(m[r], tile::quad_max(tile_max));
      any_above_threshold |= raised[r] != m[r];
    }
    if (!kAsksFirst || __any_sync(0xFFFFFFFFu, any_above_threshold)) {
#pragma unroll
      for (int r = 0; r < kThreadRows; ++r) {
        const float factor = ptx::exp2((m[r] - (raised[r] == -INFINITY ? 0.0f : raised[r])) * exponent.c);
        m[r] = raised[r];
        l[r] *= factor;
        out.scale_row(r, factor);
      }
    }
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) l[r] += exponentiate(scores, r, exponent);
  }

  // The state of a whole row, whose sum is shared by four threads. scale: the factor that was folded into the exponent.
  __device__ __forceinline__ attention::SoftmaxState<float> state(int r, float scale) const {
    attention::SoftmaxState<float> state = {.m = m[r] * scale, .l = tile::quad_sum(l[r])};
    if (m[r] == -INFINITY) state.m = -INFINITY;  // whatever the sign of the scale
    return state;
  }

 private:
  // scores -> P of a row. Returns the thread's share of their sum. The caller adds the share as one number, because the
  // sum of a long row would round single terms away.
  template <class Scores>
  __device__ __forceinline__ float exponentiate(Scores& scores, int r, const Exponent& exponent) const {
    const float c = exponent.c;
    const float shift = m[r] == -INFINITY ? 0.0f : m[r];
    const float scaled_shift = shift * c;
    float sum = 0.0f;
    const auto each = [&](auto&& exponent_of) {
#pragma unroll
      for (int j = 0; j < Scores::kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores.at(r, j, e);
          score = ptx::exp2(exponent_of(score));
          sum += score;
        }
      }
    };
    if (exponent.folded) {
      each([&](float score) { return score * c - scaled_shift; });
    } else {
      each([&](float score) { return (score - shift) * c; });
    }
    return sum;
  }
};

}  // namespace flash_attn_ext
