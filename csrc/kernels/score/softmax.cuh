// The online softmax of a warp's rows: what attention/online_softmax.h does to one, with a row's elements spread over
// four threads.
#pragma once

#include "attention/online_softmax.h"
#include "ptx/math.h"
#include "tile/accumulator.h"

namespace flash_attn_ext {

// How scores become exponents of 2. exp(scale (x - m)) = 2^(c x - c m) saves a multiplication. Other scores may be as
// low as the smallest finite number, so there the difference comes first.
struct Exponent {
  bool folded;  // c holds the scale
  float c;
};

template <int kThreadRows>
struct OnlineSoftmax {
  float m[kThreadRows];  // largest score: of q.k where the scale is folded into the exponent, else of finished ones
  float l[kThreadRows];  // this thread's part of the sum of exp

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      m[r] = -INFINITY;
      l[r] = 0.0f;
    }
  }

  // scores -> P, with m, l and out brought up to date. Few tiles raise a row's maximum: kAsksFirst looks whether any
  // row's is, and spares `out` a multiplication by 1.
  template <bool kAsksFirst, class Scores, class Output>
  __device__ __forceinline__ void update(Scores& scores, Output& out, const Exponent& exponent) {
    float raised[kThreadRows];
    bool any_raised = !kAsksFirst;
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      float tile_max = scores.at(r, 0, 0);
#pragma unroll
      for (int j = 0; j < Scores::kColumnTiles; ++j) {
        tile_max = fmaxf(tile_max, fmaxf(scores.at(r, j, 0), scores.at(r, j, 1)));
      }
      raised[r] = fmaxf(m[r], tile::quad_max(tile_max));
      any_raised |= raised[r] != m[r];
    }
    if (!kAsksFirst || __any_sync(0xFFFFFFFFu, any_raised)) {
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

  // Of a whole row, whose sum four threads share. scale: what the exponent took in.
  __device__ __forceinline__ attention::SoftmaxState<float> state(int r, float scale) const {
    attention::SoftmaxState<float> state = {.m = m[r] * scale, .l = tile::quad_sum(l[r])};
    if (m[r] == -INFINITY) state.m = -INFINITY;  // whatever the sign of the scale
    return state;
  }

 private:
  // scores -> P of a row; returns the thread's part of their sum, on its own: beside a long row's sum, single terms
  // would be rounded away.
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
