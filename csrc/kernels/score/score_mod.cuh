// What happens to a tile of scores between q.k and the softmax (attention/score_mod.h), and its derivative.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/score/bias_mask.cuh"
#include "kernels/score/score_tile.cuh"
#include "ptx/math.h"

namespace flash_attn_ext {

// c tanh(scale x / c) = c − 2 c / (1 + exp(2 scale x / c)), accurate to 2^-21 of c: five instructions for each score.
struct Softcap {
  float exponent;  // 2 scale / c, times log2(e)
  float c;

  __device__ __forceinline__ explicit Softcap(const attention::ScoreMod& mod)
      : exponent(static_cast<float>(mod.scale) * (2.0f * kLog2e) / static_cast<float>(mod.softcap)),
        c(static_cast<float>(mod.softcap)) {}

  __device__ __forceinline__ float operator()(float product) const {
    return fmaf(-2.0f * c, ptx::reciprocal(1.0f + ptx::exp2(product * exponent)), c);
  }
};

// Whether anything but the scale changes a score before the bias.
__device__ __forceinline__ bool changes_before_bias(const attention::ScoreMod& mod) {
  return mod.softcap != 0.0 || mod.alibi.present();
}

// q.k -> capped.
template <class Acc>
__device__ __forceinline__ void cap(Acc& scores, const attention::ScoreMod& mod) {
  if (mod.softcap == 0.0) {
    const auto scale = static_cast<float>(mod.scale);
    for_each_element<Acc>([&](int r, int, int j, int e, int) { scores.at(r, j, e) *= scale; });
  } else {
    const Softcap cap(mod);
    for_each_element<Acc>([&](int r, int, int j, int e, int) { scores.at(r, j, e) = cap(scores.at(r, j, e)); });
  }
}

// d loss / d capped -> d loss / d scaled.
template <class Acc>
__device__ __forceinline__ void cap_backward(Acc& gradients, const Acc& capped, const attention::ScoreMod& mod) {
  if (mod.softcap == 0.0) return;
  const float inverse = 1.0f / static_cast<float>(mod.softcap);
  for_each_element<Acc>([&](int r, int, int j, int e, int) {
    const float t = capped.at(r, j, e) * inverse;
    gradients.at(r, j, e) *= 1.0f - t * t;
  });
}

template <class Tile>
__device__ __forceinline__ void add_alibi(typename Tile::Accumulator& scores, const Tile& where) {
  const attention::AlibiSlopes& alibi = where.p.score_mod.alibi;
  if (!alibi.present()) return;
  const float slope = alibi.at<float>(where.coord.sequence.batch, where.coord.head);
  // Key minus diagonal key of the tile's first element. Differences within the tile are small numbers.
  const int64_t diagonal = where.p.visibility.diagonal(where.coord.sequence);
  const auto origin = static_cast<float>(where.key(0, 0) - where.query(0, 0) - diagonal);
  for_each_element<typename Tile::Accumulator>([&](int r, int row, int j, int e, int column) {
    const int step = Tile::kRowsAreQueries ? column - row : row - column;
    scores.at(r, j, e) += slope * attention::alibi_derivative(origin + static_cast<float>(step));
  });
}

// q.k -> score with ALiBi, which is linear in the key on either side of the diagonal: two FMAs for each score. Tiles
// that the diagonal of the warp's rows crosses take an instruction more. Where no query sees a later key they need not:
// hide_invisible() sets scores after the diagonal to -inf.
template <bool kLaterKeys>
struct Alibi {
  float scale;
  float slope = 0.0f;
  int diagonal_key = 0;      // of the thread's first row, before its first column
  int diagonal_of_warp = 0;  // of the warp's first row

  __device__ __forceinline__ explicit Alibi(const attention::ScoreMod& mod) : scale(static_cast<float>(mod.scale)) {}

  // Prepares the rows of a work tile.
  template <class Tile>
  __device__ __forceinline__ void start(const Tile& where) {
    using Acc = typename Tile::Accumulator;
    slope = where.p.score_mod.alibi.template at<float>(where.coord.sequence.batch, where.coord.head);
    diagonal_key = static_cast<int>(where.query(Acc::row(0), 0) + where.p.visibility.diagonal(where.coord.sequence)) -
                   Acc::column(0, 0);
    if constexpr (kLaterKeys) diagonal_of_warp = __shfl_sync(0xFFFFFFFFu, diagonal_key, 0);
  }

  template <class Acc>
  __device__ __forceinline__ void apply(Acc& scores, int first_key) const {
    if constexpr (kLaterKeys) {
      const int first = first_key - diagonal_of_warp;
      const bool is_after = first >= kLastRow;
      if (!is_after && first + Acc::kColumnTiles * 8 > 1) return apply_across(scores, first_key);
      apply_on_one_side(scores, first_key, is_after ? -slope : slope);
    } else {
      apply_on_one_side(scores, first_key, slope);
    }
  }

 private:
  static constexpr int kLastRow = 15;  // of a warp

  template <class Acc>
  __device__ __forceinline__ void apply_on_one_side(Acc& scores, int first_key, float slope_of_side) const {
#pragma unroll
    for (int r = 0; r < Acc::kThreadRows; ++r) {
      const float of_first = slope_of_side * distance<Acc>(first_key, r);
#pragma unroll
      for (int j = 0; j < Acc::kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          scores.at(r, j, e) = fmaf(scores.at(r, j, e), scale, fmaf(slope_of_side, from_first<Acc>(j, e), of_first));
        }
      }
    }
  }

  template <class Acc>
  __device__ __forceinline__ void apply_across(Acc& scores, int first_key) const {
#pragma unroll
    for (int r = 0; r < Acc::kThreadRows; ++r) {
      const float of_first = distance<Acc>(first_key, r);
#pragma unroll
      for (int j = 0; j < Acc::kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float derivative = attention::alibi_derivative(of_first + from_first<Acc>(j, e));
          scores.at(r, j, e) = fmaf(scores.at(r, j, e), scale, slope * derivative);
        }
      }
    }
  }

  // From the diagonal key of row r to the thread's first key.
  template <class Acc>
  __device__ __forceinline__ float distance(int first_key, int r) const {
    return static_cast<float>(first_key - diagonal_key - (Acc::row(r) - Acc::row(0)));
  }
  // From the thread's first key to another one.
  template <class Acc>
  __device__ __forceinline__ static float from_first(int j, int e) {
    return static_cast<float>(Acc::column(j, e) - Acc::column(0, 0));
  }
};

// q.k -> score, for the softmax. kGeneric: any feature may change it; otherwise only a bias or mask. folds_scale: the
// softmax multiplies by the scale.
template <bool kGeneric, class Tile, class BiasMask>
__device__ __forceinline__ void modify(typename Tile::Accumulator& scores, const Tile& where, const BiasMask& bias_mask,
                                       bool masked, bool folds_scale) {
  const attention::ScoreMod& mod = where.p.score_mod;
  const bool has_bias = mod.bias.present();
  // The scale and the addition of the bias are one FMA where nothing comes between them.
  const bool scaled_later = has_bias && (!kGeneric || !changes_before_bias(mod));
  if (!folds_scale && !scaled_later) cap(scores, mod);
  if constexpr (kGeneric) add_alibi(scores, where);
  if (has_bias) {
    const float factor = scaled_later ? static_cast<float>(mod.scale) : 1.0f;
    // Adding -inf to a NaN leaves a NaN, whose row is recomputed.
    bias_mask.template for_each_bias<kGeneric>(where, [&](int r, int j, float low, float high) {
      scores.at(r, j, 0) = fmaf(scores.at(r, j, 0), factor, low);
      scores.at(r, j, 1) = fmaf(scores.at(r, j, 1), factor, high);
    });
  }
  if (masked) bias_mask.for_each_masked([&](int r, int j, int e) { scores.at(r, j, e) = -INFINITY; });
}

}  // namespace flash_attn_ext
