// The online softmax of a warp's 16 rows, in the two forms that hide it best behind products that are in flight.
#pragma once

#include "kernels/score/softmax.cuh"
#include "tile/sm90/gemm.h"

namespace flash_attn_ext::sm90 {

// What exponents are relative to.
enum class Reference {
  // The row's maximum over its first tile of keys, whatever follows. It costs later tiles neither a maximum nor a
  // product with O, and nothing is lost as long as the row's sum stays in range: P, O and the sum have float32's
  // exponents.
  kFirstTile,
  // The row's maximum so far, as it was when it last grew by more than 2^raise_log2: fewer products with O.
  kRaised,
};

// Outside of this a row of kFirstTile is computed again.
inline constexpr float kLeastSum = 0x1p-30f;
inline constexpr float kLargestSum = 0x1p64f;

// What a warpgroup does in the midst of its exponentials: nothing.
struct NoInterlude {
  __device__ __forceinline__ void operator()(float) const {}
};

struct RowSoftmax {
  float m[2];       // the reference: of q.k where the scale is folded into the exponent, else of finished scores
  float l[2];       // this thread's part of the sum of exp
  float kept[2];    // of that, what dropout keeps
  float factor[2];  // what O has to be multiplied by where `raised`
  bool raised;      // some row of the warp

  // scores -> P, of the first tile.
  template <Reference kReference, class Scores>
  __device__ __forceinline__ void begin(Scores& scores, const Exponent& exponent) {
    raised = false;
    factor[0] = factor[1] = 1.0f;
    l[0] = l[1] = 0.0f;
    kept[0] = kept[1] = 0.0f;
    float maximum[2];
    row_maxima(maximum, scores);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      m[r] = kReference == Reference::kFirstTile && maximum[r] == -INFINITY ? 0.0f : maximum[r];
    }
    exponentiate(scores, exponent, NoInterlude{});
  }

  // The same of one that follows. interlude(value): in between, when what `value` is made of has been computed.
  template <Reference kReference, class Scores, class Interlude>
  __device__ __forceinline__ void update(Scores& scores, const Exponent& exponent, float raise_log2,
                                         Interlude&& interlude) {
    if constexpr (kReference == Reference::kRaised) {
      float maximum[2];
      row_maxima(maximum, scores);
      raise(maximum, exponent.c, raise_log2);
    }
    exponentiate(scores, exponent, interlude);
  }

  // P, of which dropout has made 0 what it drops.
  template <class Scores>
  __device__ __forceinline__ void add_kept(const Scores& weights) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sums[2] = {};
#pragma unroll
      for (int j = 0; j < Scores::kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) sums[e] += weights.at(r, j, e);
      }
      kept[r] += sums[0] + sums[1];
    }
  }

  // A number that all of the above has to be computed for.
  __device__ __forceinline__ float total() const { return l[0] + l[1] + (kept[0] + kept[1]); }

  template <class... Sums>
  __device__ __forceinline__ void rescale(Sums&... sums) const {
    if (!raised) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) (sums.scale_row(r, factor[r]), ...);
  }

  // Of a whole row, whose sum the four threads of a quad share. scale: what the exponent took in.
  __device__ __forceinline__ attention::SoftmaxState<float> state_of(int r, float scale) const {
    const float sum = tile::quad_sum(l[r]);
    return {.m = sum == 0.0f ? -INFINITY : m[r] * scale, .l = sum};
  }

 private:
  __device__ __forceinline__ static float shift_of(float m) { return m == -INFINITY ? 0.0f : m; }

  template <class Scores>
  __device__ __forceinline__ static void row_maxima(float (&maximum)[2], const Scores& scores) {
    float partial[2][2];
#pragma unroll
    for (int j = 0; j < Scores::kColumnTiles; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          partial[r][e] = j == 0 ? scores.at(r, j, e) : fmaxf(partial[r][e], scores.at(r, j, e));
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) maximum[r] = tile::quad_max(fmaxf(partial[r][0], partial[r][1]));
  }

  __device__ __forceinline__ void raise(const float (&maximum)[2], float c, float raise_log2) {
    const float candidate[2] = {fmaxf(m[0], maximum[0]), fmaxf(m[1], maximum[1])};
    // Rows that have seen nothing yet compare NaN.
    const bool grew = (candidate[0] - m[0]) * c > raise_log2 || (candidate[1] - m[1]) * c > raise_log2;
    raised = __any_sync(0xFFFFFFFFu, grew);
    if (!raised) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      factor[r] = ptx::exp2((m[r] - shift_of(candidate[r])) * c);
      m[r] = candidate[r];
      l[r] *= factor[r];
      kept[r] *= factor[r];
    }
  }

  template <class Scores, class Interlude>
  __device__ __forceinline__ void exponentiate(Scores& scores, const Exponent& exponent, Interlude&& interlude) {
    constexpr int kBefore = Scores::kColumnTiles / 4;  // column tiles whose exponentials come before the interlude
    const float c = exponent.c;
    const float shift[2] = {shift_of(m[0]), shift_of(m[1])};
    const float scaled[2] = {shift[0] * c, shift[1] * c};
    float sums[2][2] = {};
    const auto each = [&](auto&& exponent_of) {
#pragma unroll
      for (int j = 0; j < Scores::kColumnTiles; ++j) {
        if (j == kBefore) interlude(l[0] + (sums[0][0] + sums[0][1]) + (sums[1][0] + sums[1][1]));
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& score = scores.at(r, j, e);
            score = ptx::exp2(exponent_of(score, r));
            sums[r][e] += score;
          }
        }
      }
    };
    if (exponent.folded) {
      each([&](float score, int r) { return score * c - scaled[r]; });
    } else {
      each([&](float score, int r) { return (score - shift[r]) * c; });
    }
    l[0] += sums[0][0] + sums[0][1];
    l[1] += sums[1][0] + sums[1][1];
  }
};

}  // namespace flash_attn_ext::sm90
