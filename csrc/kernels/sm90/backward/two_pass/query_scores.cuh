// How a warpgroup's S and dP become P and dS, by what changes the scores. All but generic kernels compute P while the
// GEMM of dP is in flight.
#pragma once

#include "kernels/score/score_gradient.cuh"
#include "kernels/sm90/backward/two_pass/traits.h"
#include "kernels/sm90/bias_mask.cuh"
#include "ptx/math.h"

namespace flash_attn_ext::sm90 {

// Scale-only kernels: c S - lse is the exponent. The lse of a query that the sequence does not have is infinite.
template <class Traits>
struct ScaledScores {
  using Element = typename Traits::Element;
  using Scores = typename Traits::Scores;
  using Where = typename Traits::Where;
  using PackedScores = tile::PackedRows<Traits::kRows>;
  static constexpr int kThreadRows = Scores::kThreadRows;

  const TwoPassArguments& args;
  float lse[kThreadRows] = {};  // of the thread's rows
  float delta[kThreadRows] = {};

  // Called at the beginning of a query tile.
  __device__ __forceinline__ void begin(const float* statistics) {
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      lse[r] = statistics[Scores::row(r)];
      delta[r] = statistics[Traits::kRows + Scores::row(r)];
    }
  }

  // Reads what a key tile needs, ahead of it.
  __device__ __forceinline__ void prepare(const Where&, bool) {}

  // Computes S -> P in place, and packs P as the GEMM with dO reads it.
  __device__ __forceinline__ void exponentiate(Scores& scores, PackedScores& p, bool) const {
    const float c = args.scale_log2e;
#pragma unroll
    for (int j = 0; j < Scores::kColumnTiles; ++j) {
#pragma unroll
      for (int r = 0; r < kThreadRows; ++r) {
#pragma unroll
        for (int e = 0; e < 2; ++e) scores.at(r, j, e) = ptx::exp2(fmaf(scores.at(r, j, e), c, -lse[r]));
        p.a[j / 2][j % 2 * 2 + r] = ptx::pack_in_order(scores.at(r, j, 0), scores.at(r, j, 1), Element{});
      }
    }
  }

  // Computes P and dP -> dS, packed as the GEMMs with K and Q read it.
  __device__ __forceinline__ void differentiate(const Scores& scores, const Scores& gradients,
                                                PackedScores& dscores) const {
    pack_gradients(dscores,
                   [&](int r, int j, int e) { return scores.at(r, j, e) * (gradients.at(r, j, e) - delta[r]); });
  }

 protected:
  template <class Function>
  __device__ __forceinline__ static void pack_gradients(PackedScores& dscores, Function&& gradient) {
#pragma unroll
    for (int j = 0; j < Scores::kColumnTiles; ++j) {
#pragma unroll
      for (int r = 0; r < kThreadRows; ++r) {
        dscores.a[j / 2][j % 2 * 2 + r] = ptx::pack_in_order(gradient(r, j, 0), gradient(r, j, 1), Element{});
      }
    }
  }
};

// A thread's bits of a mask, which it reads one tile ahead, or computes from intervals.
template <class Traits>
struct TileMask {
  using Scores = typename Traits::Scores;
  using Where = typename Traits::Where;

  uint32_t bits = 0;  // of both rows, 16 each

  // Four words hold the bits of 128 keys, which are two tiles. Their address is computed again for each tile, because
  // keeping it would take registers.
  __device__ __forceinline__ void prepare(const Where& where, bool masked) {
    static_assert(attention::MaskBits::kKeys == 2 * Traits::kRows && Scores::kThreadRows == 2);
    if (!masked) return;
    const attention::RowIntervals& intervals = where.p.score_mod.intervals;
    if (intervals.present()) {
      const attention::Sequence& sequence = where.coord.sequence;
      const auto word_of = [&](int r) {
        const int64_t query = min(where.first_row + Scores::row(r), sequence.num_queries - 1);
        return intervals.quad_word(intervals.row(sequence, where.coord.head, query),
                                   static_cast<int>(where.first_column), tile::lane() % 4);
      };
      bits = __byte_perm(word_of(0), word_of(1), 0x5410);
      return;
    }
    const attention::MaskBits& mask = where.p.score_mod.mask_bits;
    const auto tile = static_cast<int>(where.first_column) / Traits::kRows;
    const uint32_t* words = mask.data + where.coord.sequence.batch * mask.batch_stride +
                            where.coord.head * mask.head_stride + tile / 2 * 4 + tile::lane() % 4;
    const auto last = static_cast<int>(where.p.sequences.max_seqlen_q) - 1;
    const auto first_row = static_cast<int>(where.first_row);
    const auto word = [&](int r) { return words[min(first_row + Scores::row(r), last) * mask.query_stride]; };
    const int shift = tile % 2 * 16;
    bits = __byte_perm(word(0) >> shift, word(1) >> shift, 0x5410);
  }

  __device__ __forceinline__ bool attends(int r, int j, int e) const {
    return (bits >> (16 * r + 2 * j + e) & 1u) != 0;
  }

  // What generic kernels ask of a bias and a mask.
  __device__ __forceinline__ void await() const {}
  template <bool kAny, class Function>
  __device__ __forceinline__ void for_each_bias(const Where&, Function&&) const {}
  template <class Function>
  __device__ __forceinline__ void for_each_masked(Function&& function) const {
    for_each_element<Scores>([&](int r, int, int j, int e, int) {
      if (!attends(r, j, e)) function(r, j, e);
    });
  }
};

// Kernels for a mask, or intervals.
template <class Traits>
struct MaskedScores : ScaledScores<Traits> {
  using Base = ScaledScores<Traits>;
  using typename Base::Element;
  using typename Base::PackedScores;
  using typename Base::Scores;
  using typename Base::Where;

  TileMask<Traits> mask;

  __device__ __forceinline__ explicit MaskedScores(const TwoPassArguments& arguments) : Base{arguments} {}

  __device__ __forceinline__ void prepare(const Where& where, bool masked) { mask.prepare(where, masked); }

  __device__ __forceinline__ void exponentiate(Scores& scores, PackedScores& p, bool masked) const {
    if (!masked) {
      Base::exponentiate(scores, p, masked);
      return;
    }
    const float c = this->args.scale_log2e;
    for_each_element<Scores>([&](int r, int, int j, int e, int) {
      const float probability = ptx::exp2(fmaf(scores.at(r, j, e), c, -this->lse[r]));
      scores.at(r, j, e) = mask.attends(r, j, e) ? probability : 0.0f;
    });
    p.pack(scores, Element{});
  }
};

// Kernels for a bias and a mask: TMA loads the bias beside K.
template <class Traits>
struct BiasedScores : MaskedScores<Traits> {
  using Base = MaskedScores<Traits>;
  using typename Base::Element;
  using typename Base::PackedScores;
  using typename Base::Scores;
  using typename Base::Where;

  const typename Traits::BiasTile* bias = nullptr;  // in the current stage
  float residual[Scores::kThreadRows] = {};

  __device__ __forceinline__ explicit BiasedScores(const TwoPassArguments& arguments) : Base(arguments) {}

  __device__ __forceinline__ void begin(const float* statistics) {
    Base::begin(statistics);
#pragma unroll
    for (int r = 0; r < Scores::kThreadRows; ++r) residual[r] = statistics[2 * Traits::kRows + Scores::row(r)];
  }

  __device__ __forceinline__ void exponentiate(Scores& scores, PackedScores& p, bool masked) const {
    if (is_exact()) {
      weigh<true>(scores);
    } else {
      weigh<false>(scores);
    }
    if (masked) {
      for_each_element<Scores>([&](int r, int, int j, int e, int) {
        scores.at(r, j, e) = this->mask.attends(r, j, e) ? scores.at(r, j, e) : 0.0f;
      });
    }
    p.pack(scores, Element{});
  }

  __device__ __forceinline__ void differentiate(const Scores& scores, const Scores& gradients,
                                                PackedScores& dscores) const {
    if (is_exact()) {
      this->pack_gradients(dscores, [&](int r, int j, int e) {
        const float probability = scores.at(r, j, e);
        return probability == 0.0f ? 0.0f : probability * (gradients.at(r, j, e) - this->delta[r]);
      });
    } else {
      Base::differentiate(scores, gradients, dscores);
    }
  }

 private:
  // Whether masked elements must have a dS of exactly 0, even where q, k, v or dout are NaN. dBias contains each dS. In
  // the other gradients, rows with a NaN are recomputed.
  __device__ __forceinline__ bool is_exact() const { return this->args.params.dbias.present(); }

  template <bool kExact>
  __device__ __forceinline__ void weigh(Scores& scores) const {
    const auto scale = static_cast<float>(this->args.params.score_mod.scale);
    for_each_boxed_bias<Scores>(bias, [&](int r, int j, float low, float high) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float added = e == 0 ? low : high;
        const bool is_hidden = added == -INFINITY || scores.at(r, j, e) == -INFINITY;  // the second by visibility
        // The LSE is subtracted before the factor log2(e), because a score may be as low as the smallest finite number,
        // and would overflow.
        const float above = fmaf(scores.at(r, j, e), scale, added) - this->lse[r];
        const float probability = ptx::exp2(fmaf(above, kLog2e, -residual[r]));
        scores.at(r, j, e) = kExact && is_hidden ? 0.0f : probability;
      }
    });
  }
};

// Generic kernels, in which everything may change a score, or everything but a bias, with or without a mask.
template <class Traits>
struct GenericScores : ScaledScores<Traits> {
  using Base = ScaledScores<Traits>;
  using typename Base::Element;
  using typename Base::PackedScores;
  using typename Base::Scores;
  using typename Base::Where;

  using BiasMask = std::conditional_t<Traits::kStagesBiasMask, PrefetchedBiasMask<Traits>,
                                      std::conditional_t<Traits::kHasOnlyBits, TileMask<Traits>, NoBiasMask>>;

  BiasMask bias_mask;
  float residual[Scores::kThreadRows] = {};

  __device__ __forceinline__ GenericScores(const TwoPassArguments& arguments, BiasMask of_warp = {})
      : Base{arguments}, bias_mask{of_warp} {}

  __device__ __forceinline__ void begin(const float* statistics) {
    Base::begin(statistics);
#pragma unroll
    for (int r = 0; r < Scores::kThreadRows; ++r) residual[r] = statistics[2 * Traits::kRows + Scores::row(r)];
  }

  __device__ __forceinline__ void prepare(const Where& where, bool masked) {
    bias_mask.prepare(where, masked);
    __syncwarp();
  }

  // Computes S -> P and dP -> dS in place.
  template <bool kPartial>
  __device__ __forceinline__ void differentiate(Scores& scores, Scores& gradients, const Where& where, bool masked) {
    const auto statistics = [&](int r, int) {
      return QueryStatistics{.lse = this->lse[r], .delta = this->delta[r], .residual = residual[r]};
    };
    flash_attn_ext::differentiate<Differentiation<true, kPartial, GradientOf::kProduct>>(scores, gradients, where,
                                                                                         bias_mask, masked, statistics);
  }
};

template <class Traits>
using QueryScores = std::conditional_t<
    Traits::kGeneric, GenericScores<Traits>,
    std::conditional_t<Traits::kHasBoxes, BiasedScores<Traits>,
                       std::conditional_t<Traits::kHasBits, MaskedScores<Traits>, ScaledScores<Traits>>>>;

}  // namespace flash_attn_ext::sm90
