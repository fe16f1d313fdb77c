// From products and dP to P and dS of a warpgroup's tile, by what changes the scores. All but Extended kernels compute
// P while dP is on its way.
#pragma once

#include "kernels/score/score_gradient.cuh"
#include "kernels/sm90/backward_storing/traits.h"
#include "kernels/sm90/terms.cuh"
#include "ptx/math.h"

namespace flash_attn_ext::sm90 {

// Plain kernels: c S - lse is the exponent. Of queries that the sequence does not have, lse is infinite.
template <class Traits>
struct ScaledScores {
  using Element = typename Traits::Element;
  using Scores = typename Traits::Scores;
  using Where = typename Traits::Where;
  using PackedScores = tile::PackedRows<Traits::kRows>;
  static constexpr int kThreadRows = Scores::kThreadRows;

  const StoringArguments& args;
  float lse[kThreadRows] = {};  // of the thread's rows
  float delta[kThreadRows] = {};

  // At the beginning of a tile of queries.
  __device__ __forceinline__ void begin(const QueryTileWork&, const float* statistics, int) {
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      lse[r] = statistics[Scores::row(r)];
      delta[r] = statistics[Traits::kRows + Scores::row(r)];
    }
  }

  // What is needed of a tile of keys, ahead of it.
  __device__ __forceinline__ void prepare(const Where&, bool) {}

  // S -> P, and packed as it multiplies dO.
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

  // P and dP -> dS, packed.
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

// Mask kernels: a thread reads its bits one tile ahead.
template <class Traits>
struct MaskedScores : ScaledScores<Traits> {
  using Base = ScaledScores<Traits>;
  using typename Base::Element;
  using typename Base::PackedScores;
  using typename Base::Scores;
  using typename Base::Where;

  uint32_t bits = 0;  // of both rows, 16 each

  __device__ __forceinline__ explicit MaskedScores(const StoringArguments& arguments) : Base{arguments} {}

  // Words are of 128 keys, two tiles. Where they lie takes registers, if it is kept from tile to tile.
  __device__ __forceinline__ void prepare(const Where& where, bool masked) {
    static_assert(attention::MaskBits::kKeys == 2 * Traits::kRows && Scores::kThreadRows == 2);
    if (!masked) return;
    const attention::MaskBits& mask = this->args.params.score_mod.mask_bits;
    const auto tile = static_cast<int>(where.first_column) / Traits::kRows;
    const uint32_t* words = mask.data + where.item.sequence.batch * mask.batch_stride +
                            where.item.head * mask.head_stride + tile / 2 * 4 + tile::lane() % 4;
    const auto last = static_cast<int>(this->args.params.sequences.max_seqlen_q) - 1;
    const auto first_row = static_cast<int>(where.first_row);
    const auto word = [&](int r) { return words[min(first_row + Scores::row(r), last) * mask.query_stride]; };
    const int shift = tile % 2 * 16;
    bits = __byte_perm(word(0) >> shift, word(1) >> shift, 0x5410);
  }

  __device__ __forceinline__ void exponentiate(Scores& scores, PackedScores& p, bool masked) const {
    if (!masked) {
      Base::exponentiate(scores, p, masked);
      return;
    }
    const float c = this->args.scale_log2e;
    for_each_element<Scores>([&](int r, int, int j, int e, int) {
      const float probability = ptx::exp2(fmaf(scores.at(r, j, e), c, -this->lse[r]));
      scores.at(r, j, e) = attends(r, j, e) ? probability : 0.0f;
    });
    p.pack(scores, Element{});
  }

 protected:
  __device__ __forceinline__ bool attends(int r, int j, int e) const {
    return (bits >> (16 * r + 2 * j + e) & 1u) != 0;
  }
};

// BiasMask kernels: the bias lies beside K.
template <class Traits>
struct BiasedScores : MaskedScores<Traits> {
  using Base = MaskedScores<Traits>;
  using typename Base::Element;
  using typename Base::PackedScores;
  using typename Base::Scores;
  using typename Base::Where;

  const typename Traits::BiasTile* bias = nullptr;  // of the stage at hand
  float residual[Scores::kThreadRows] = {};

  __device__ __forceinline__ explicit BiasedScores(const StoringArguments& arguments) : Base(arguments) {}

  __device__ __forceinline__ void begin(const QueryTileWork& work, const float* statistics, int first_query) {
    Base::begin(work, statistics, first_query);
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
        scores.at(r, j, e) = this->attends(r, j, e) ? scores.at(r, j, e) : 0.0f;
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
  // dBias shows each dS: what nobody attends gives 0 even where q, k, v or dout are NaN. Of the other gradients, rows
  // that met a NaN are computed again.
  __device__ __forceinline__ bool is_exact() const { return this->args.params.dbias.present(); }

  template <bool kExact>
  __device__ __forceinline__ void weigh(Scores& scores) const {
    const auto scale = static_cast<float>(this->args.params.score_mod.scale);
    for_each_boxed_bias<Scores>(bias, [&](int r, int j, float low, float high) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float added = e == 0 ? low : high;
        const bool is_hidden = added == -INFINITY || scores.at(r, j, e) == -INFINITY;  // by visibility
        // The difference comes first: scores may be as low as the smallest finite number.
        const float above = fmaf(scores.at(r, j, e), scale, added) - this->lse[r];
        const float probability = ptx::exp2(fmaf(above, kLog2e, -residual[r]));
        scores.at(r, j, e) = kExact && is_hidden ? 0.0f : probability;
      }
    });
  }
};

// Extended and Modified kernels: everything may change a score, or everything but a bias and a mask.
template <class Traits>
struct ExtendedScores : ScaledScores<Traits> {
  using Base = ScaledScores<Traits>;
  using typename Base::Element;
  using typename Base::PackedScores;
  using typename Base::Scores;
  using typename Base::Where;

  using Terms = std::conditional_t<Traits::kStagesTerms, StagedTerms<Traits>, NoTerms>;

  Terms terms;
  float residual[Scores::kThreadRows] = {};

  __device__ __forceinline__ ExtendedScores(const StoringArguments& arguments, Terms of_warp = {})
      : Base{arguments}, terms{of_warp} {}

  __device__ __forceinline__ void begin(const QueryTileWork& work, const float* statistics, int first_query) {
    Base::begin(work, statistics, first_query);
#pragma unroll
    for (int r = 0; r < Scores::kThreadRows; ++r) residual[r] = statistics[2 * Traits::kRows + Scores::row(r)];
  }

  __device__ __forceinline__ void prepare(const Where& where, bool masked) {
    terms.prepare(where, masked);
    __syncwarp();
  }

  // S -> P and dP -> dS, both packed.
  template <bool kPartial>
  __device__ __forceinline__ void differentiate(Scores& scores, Scores& gradients, const Where& where, bool masked) {
    const auto statistics = [&](int r, int) {
      return QueryStatistics{.lse = this->lse[r], .delta = this->delta[r], .residual = residual[r]};
    };
    flash_attn_ext::differentiate<Differentiation<true, kPartial, GradientOf::kProduct>>(scores, gradients, where,
                                                                                         terms, masked, statistics);
  }
};

template <class Traits>
using QueryScores = std::conditional_t<
    Traits::kExtended, ExtendedScores<Traits>,
    std::conditional_t<Traits::kHasBoxes, BiasedScores<Traits>,
                       std::conditional_t<Traits::kHasBits, MaskedScores<Traits>, ScaledScores<Traits>>>>;

}  // namespace flash_attn_ext::sm90
