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

// q.k -> score where no query sees a later key: ALiBi is then linear in the key, which costs two FMAs for each score.
// Scores of keys after the diagonal are wrong here: hide_invisible() sets them to -inf.
struct CausalAlibi {
  float scale;
  float slope = 0.0f;
  int diagonal_key = 0;  // of the thread's first row, before its first column

  __device__ __forceinline__ explicit CausalAlibi(const attention::ScoreMod& mod)
      : scale(static_cast<float>(mod.scale)) {}

  // Prepares the rows of a work tile.
  template <class Tile>
  __device__ __forceinline__ void start(const Tile& where) {
    slope = where.p.score_mod.alibi.template at<float>(where.coord.sequence.batch, where.coord.head);
    diagonal_key = static_cast<int>(where.query(Tile::Accumulator::row(0), 0) +
                                    where.p.visibility.diagonal(where.coord.sequence)) -
                   Tile::Accumulator::column(0, 0);
  }

  template <class Acc>
  __device__ __forceinline__ void apply(Acc& scores, int first_key) const {
#pragma unroll
    for (int r = 0; r < Acc::kThreadRows; ++r) {
      const float of_first = slope * static_cast<float>(first_key - diagonal_key - (Acc::row(r) - Acc::row(0)));
#pragma unroll
      for (int j = 0; j < Acc::kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const auto column = static_cast<float>(Acc::column(j, e) - Acc::column(0, 0));
          scores.at(r, j, e) = fmaf(scores.at(r, j, e), scale, fmaf(slope, column, of_first));
        }
      }
    }
  }
};

// q.k -> score with a bias that is broadcast along queries, in q's type or, where kMayBeFloat32, in float32. Its keys
// follow each other in memory. A thread reads those of its columns while S is computed.
template <class Element, class Acc, bool kMayBeFloat32>
struct KeyBias {
  using Pair = std::conditional_t<kMayBeFloat32, float2, uint32_t>;

  float scale;
  bool is_float32;
  float maximum = 0.0f;                   // that is subtracted from a float32 bias (KeyBiasMaxima)
  const void* of_first_column = nullptr;  // of the thread, in tiles that begin with key 0
  Pair pairs[Acc::kColumnTiles];          // of neighbouring keys of the tile

  __device__ __forceinline__ explicit KeyBias(const attention::ScoreMod& mod)
      : scale(static_cast<float>(mod.scale)),
        is_float32(kMayBeFloat32 && mod.bias.element == attention::ElementType::kFloat32) {}

  // Prepares the rows of a work tile.
  template <class Tile>
  __device__ __forceinline__ void start(const Tile& where, float maximum_of_rows) {
    maximum = maximum_of_rows;
    const attention::BroadcastView& bias = where.p.score_mod.bias;
    const int64_t offset = bias.offset({where.coord.sequence.batch, where.coord.head, 0, Acc::column(0, 0)});
    if (is_float32) {
      of_first_column = static_cast<const float*>(bias.data) + offset;
    } else {
      of_first_column = static_cast<const Element*>(bias.data) + offset;
    }
  }

  // Reads the bias of a tile of keys, of which `keys` exist.
  __device__ __forceinline__ void read(int first_key, int keys) {
    if constexpr (kMayBeFloat32) {
      if (is_float32) return read_pairs<float2>(static_cast<const float*>(of_first_column) + first_key, keys);
    }
    read_pairs<uint32_t>(static_cast<const uint16_t*>(of_first_column) + first_key, keys);
  }

  __device__ __forceinline__ void apply(Acc& scores) const {
#pragma unroll
    for (int j = 0; j < Acc::kColumnTiles; ++j) {
      const float2 bias = unpack(pairs[j]);
#pragma unroll
      for (int r = 0; r < Acc::kThreadRows; ++r) {
        scores.at(r, j, 0) = fmaf(scores.at(r, j, 0), scale, bias.x);
        scores.at(r, j, 1) = fmaf(scores.at(r, j, 1), scale, bias.y);
      }
    }
  }

 private:
  // Bits: the type of an element, or of its bit pattern. Two: the type of two of these.
  template <class Two, class Bits>
  __device__ __forceinline__ void read_pairs(const Bits* of_tile, int keys) {
    if (reinterpret_cast<uintptr_t>(of_tile) % sizeof(Two) == 0 && keys >= 8 * Acc::kColumnTiles) {
#pragma unroll
      for (int j = 0; j < Acc::kColumnTiles; ++j) hold(pairs[j], __ldg(reinterpret_cast<const Two*>(of_tile + 8 * j)));
      return;
    }
    const int last = keys - 1 - Acc::column(0, 0);
#pragma unroll
    for (int j = 0; j < Acc::kColumnTiles; ++j) {
      const auto of_key = [&](int e) { return __ldg(of_tile + min(8 * j + e, last)); };
      if constexpr (std::is_same_v<Two, float2>) {
        hold(pairs[j], Two{of_key(0), of_key(1)});
      } else {
        hold(pairs[j], static_cast<uint32_t>(of_key(0)) | static_cast<uint32_t>(of_key(1)) << 16);
      }
    }
  }

  __device__ __forceinline__ void hold(float2& pair, float2 from) const { pair = {from.x - maximum, from.y - maximum}; }
  __device__ __forceinline__ static void hold(float2& pair, uint32_t from) { pair = ptx::unpack(from, Element{}); }
  __device__ __forceinline__ static void hold(uint32_t& pair, uint32_t from) { pair = from; }
  __device__ __forceinline__ static float2 unpack(float2 pair) { return pair; }
  __device__ __forceinline__ static float2 unpack(uint32_t pair) { return ptx::unpack(pair, Element{}); }
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
