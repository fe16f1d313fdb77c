// Masking, P from S, and dS from P and dP, in an iteration: for 64 keys of a key warpgroup and 64 queries.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "kernels/schedule/mask_iterations.h"
#include "kernels/sm90/backward/key_stationary/dbias_of_keys.cuh"
#include "kernels/sm90/backward/key_stationary/dscore_keys.cuh"
#include "kernels/sm90/backward/key_stationary/traits.h"
#include "ptx/math.h"
#include "ptx/pin.h"

namespace flash_attn_ext::sm90 {

// Which scores of an iteration are unmasked by the boolean mask, or by intervals and blocks, for a thread's keys and
// queries. A bit for each score that a thread holds. It is read an iteration ahead, while GEMMs are in flight.
struct UnmaskedScores {
  static constexpr uint32_t kAll = 0xFFFFFFFFu;

  uint32_t bits;

  // thread: its index among those that compute scores.
  __device__ __forceinline__ void read(const MaskIterations& mask, int tile, int thread) {
    bits = tile == MaskIterations::Entry::kNothingMasked
               ? kAll
               : mask.words[int64_t{tile} * MaskIterations::kThreads + thread];
  }

  // Computes the bits from the intervals of 64 queries, for a warp's 16 keys. A lane first has two queries and all of
  // the keys.
  __device__ __forceinline__ void compute(const IntervalBounds& bounds, int intervals, int first_key) {
    uint32_t of_queries = 0;
#pragma unroll 1
    for (int m = 0; m < intervals; ++m) {
      const auto of_lane = [&](int which) {
        return reinterpret_cast<const int2*>(bounds.of_queries[2 * m + which])[tile::lane()];
      };
      const int2 begins = of_lane(0);
      const int2 ends = of_lane(1);
      of_queries |= attention::RowIntervals::word(begins.x, ends.x, first_key) & 0xFFFFu;
      of_queries |= attention::RowIntervals::word(begins.y, ends.y, first_key) << 16;
    }
    bits = 0;
#pragma unroll
    for (int j = 0; j < LoopOrder::kQueries / 8; ++j) {
      const uint32_t two = __shfl_sync(0xFFFFFFFFu, of_queries, 4 * j + tile::lane() % 4);
      bits |= (two >> (tile::lane() / 4) & 0x01010101u) << j;
    }
  }

  // Masked scores become `hidden`.
  template <class Scores>
  __device__ __forceinline__ void hide(Scores& scores, float hidden) const {
    static_assert(Scores::kThreadRows * Scores::kColumnTiles * 2 == 32);
    if (__all_sync(0xFFFFFFFFu, bits == kAll)) return;
    const uint32_t unmasked = ptx::pin(bits);
    // The loop has the order of the bits: ptxas then moves seven of them into predicates at a time.
#pragma unroll
    for (int bit = 0; bit < 32; ++bit) {
      float& score = scores.at(bit / 8 % 2, bit % 8, bit / 16);
      score = (unmasked & 1u << bit) != 0 ? score : hidden;
    }
  }
};

// stage: the one that has the iteration's statistics.
template <class Traits>
struct KeyScores {
  using Element = typename Traits::Element;
  using Scores = typename Traits::Scores;
  using Packed = tile::PackedRows<Traits::kQueries>;
  static constexpr bool kInRegisters = Traits::kConfig.tile.keys_in_registers;
  static constexpr bool kKeepsWeights =
      !kInRegisters && (Traits::kDrops || Traits::kCapped || !std::is_same_v<Element, __half>);
  static constexpr float kUnshift = 1.0f / (1 << weight_shift(Traits::kConfig));
  static constexpr float kUnshiftGradients = Traits::kKeepsShift ? 1.0f : kUnshift;
  // What masked scores become, or with a softcap their y (cap()), which must be finite.
  static constexpr float kHidden = Traits::kCapped ? -0x1p63f : -INFINITY;
  struct NotHeld {};

  const KeyStationaryArguments& args;
  KeyStationaryShared<Traits>& shared;
  // The factor of dP - delta in dS, in float16: P, times the derivative of a softcap.
  std::conditional_t<kKeepsWeights, Packed, NotHeld> weights;
  std::conditional_t<Traits::kDrops, KeptScores<Traits>, NotHeld> kept;  // of the iteration
  // What ALiBi or a key bias adds to the exponents of the thread's keys, and where the LSE has no shift, the shift.
  std::conditional_t<Traits::kAlibi || Traits::kKeyBias, float[Scores::kThreadRows], NotHeld> of_keys;

  // ALiBi of an iteration is slope * (key - query - diagonal), with the negative slope where keys are later. The part
  // that depends on the query's row in its tile is in the LSE (statistics.cuh). slope: times log2(e). distance: from
  // the diagonal key of the tile's first query to the thread's first key.
  __device__ __forceinline__ void add_alibi(float slope, int distance) {
#pragma unroll
    for (int r = 0; r < Scores::kThreadRows; ++r)
      of_keys[r] = fmaf(slope, static_cast<float>(distance + Scores::row(r) - Scores::row(0)), args.shift);
  }

  // Where the diagonal may cross the iteration: add_alibi() adds slope * distance to later keys, too. So twice that is
  // subtracted from their S before, which leaves -slope * distance.
  __device__ __forceinline__ void mirror_alibi(Scores& scores, float slope, int distance) const {
    const float factor = 2.0f / kLog2e * slope * args.lse_factor;
    const auto first = static_cast<float>(distance - Scores::column(0, 0));
#pragma unroll
    for (int j = 0; j < Scores::kColumnTiles; ++j) {
#pragma unroll
      for (int r = 0; r < Scores::kThreadRows; ++r) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float later = first + static_cast<float>(Scores::row_step(r) - Scores::column_step(j, e));
          scores.at(r, j, e) = fmaf(factor, fmaxf(later, 0.0f), scores.at(r, j, e));
        }
      }
    }
  }

  // bias: of the thread's key of row r.
  __device__ __forceinline__ void add_key_bias(int r, float bias, float shift) {
    of_keys[r] = fmaf(bias, kLog2e, shift);
  }

  // Makes S so small that it changes no weight. An infinity that hides a key or a query stays one.
  __device__ __forceinline__ static void ignore(Scores& scores) {
#pragma unroll
    for (int j = 0; j < Scores::kColumnTiles; ++j) {
#pragma unroll
      for (int r = 0; r < Scores::kThreadRows; ++r) {
#pragma unroll
        for (int e = 0; e < 2; ++e) scores.at(r, j, e) *= 0x1p-100f;
      }
    }
  }

  // With a softcap, c tanh(scale s / c) = c (1 + y), where y = -2 / (1 + exp(2 scale s / c)). S -> y.
  __device__ __forceinline__ void cap(Scores& scores) const {
    const float factor = args.cap_factor;
#pragma unroll
    for (int j = 0; j < Scores::kColumnTiles; ++j) {
#pragma unroll
      for (int r = 0; r < Scores::kThreadRows; ++r) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          scores.at(r, j, e) = ptx::reciprocal(-0.5f - ptx::exp2(fmaf(scores.at(r, j, e), factor, -1.0f)));
        }
      }
    }
  }

  // Makes y of masked scores finite, so that their P, which is 0, may be multiplied by the derivative.
  __device__ __forceinline__ static void bound(Scores& scores) {
#pragma unroll
    for (int j = 0; j < Scores::kColumnTiles; ++j) {
#pragma unroll
      for (int r = 0; r < Scores::kThreadRows; ++r) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& y = scores.at(r, j, e);
          y = y < kHidden ? kHidden : y;  // NaN stays
        }
      }
    }
  }

  // S -> P, packed for dV. For dS, P stays as exact as registers allow: rounding it there would add as much error as
  // rounding dS does. own: where the bias is.
  __device__ __forceinline__ void exponentiate(Scores& scores, Packed& p, int stage, const DscoreKeys<Traits>& own) {
    [[maybe_unused]] uint32_t bias[4];  // of 16 queries
#pragma unroll
    for (int j = 0; j < Scores::kColumnTiles; ++j) {
      if constexpr (Traits::kBiased) {
        if (j % 2 == 0) own.read(bias, j / 2);
      }
#pragma unroll
      for (int r = 0; r < Scores::kThreadRows; ++r) {
        float low, high;
        [[maybe_unused]] float2 derivative;  // of the softcap: 1 - tanh^2 = -y (2 + y)
        if constexpr (Traits::kCapped) {
          const float2 lse = statistic(stage, 0, j);
          const float2 y = {scores.at(r, j, 0), scores.at(r, j, 1)};
          low = ptx::exp2(fmaf(y.x, args.cap_log2e, args.cap_log2e - lse.x));
          high = ptx::exp2(fmaf(y.y, args.cap_log2e, args.cap_log2e - lse.y));
          derivative = {-y.x * (2.0f + y.x), -y.y * (2.0f + y.y)};
        } else if constexpr (Traits::kConfig.adds_statistics) {
          low = ptx::exp2(fmaf(scores.at(r, j, 0), args.scale_log2e, shift(r)));
          high = ptx::exp2(fmaf(scores.at(r, j, 1), args.scale_log2e, shift(r)));
        } else if constexpr (Traits::kBiased) {
          const float2 lse = statistic(stage, 0, j);
          const float2 residual = statistic(stage, 2, j);
          const float2 added = ptx::unpack(bias[j % 2 * 2 + r], Element{});
          // The subtraction comes before the factor log2(e): scores may be as low as the smallest finite number.
          low = ptx::exp2(fmaf(fmaf(scores.at(r, j, 0), args.scale, added.x) - lse.x, kLog2e, -residual.x));
          high = ptx::exp2(fmaf(fmaf(scores.at(r, j, 1), args.scale, added.y) - lse.y, kLog2e, -residual.y));
        } else if constexpr (Traits::kKeyBias) {
          const float2 lse = statistic(stage, 0, j);
          low = ptx::exp2(fmaf(scores.at(r, j, 0), args.scale_log2e, of_keys[r] - lse.x));
          high = ptx::exp2(fmaf(scores.at(r, j, 1), args.scale_log2e, of_keys[r] - lse.y));
        } else {
          const float2 lse = statistic(stage, 0, j);
          low = ptx::exp2(fmaf(scores.at(r, j, 0), args.scale_log2e, -lse.x));
          high = ptx::exp2(fmaf(scores.at(r, j, 1), args.scale_log2e, -lse.y));
        }
        p.a[j / 2][j % 2 * 2 + r] = ptx::pack_in_order(low, high, Element{});
        if constexpr (Traits::kCapped) {
          low *= derivative.x;
          high *= derivative.y;
        }
        if constexpr (kInRegisters) {
          scores.at(r, j, 0) = low;
          scores.at(r, j, 1) = high;
        } else if constexpr (kKeepsWeights) {
          weights.a[j / 2][j % 2 * 2 + r] = ptx::pack_in_order(low, high, __half{});
        }
      }
    }
  }

  // P of dropped weights becomes 0.
  __device__ __forceinline__ void drop(Packed& p, uint32_t address_of_draws) {
    kept.read(address_of_draws);
    kept.keep(p);
  }

  // The factor of dP.
  __device__ __forceinline__ float factor() const {
    if constexpr (Traits::kDrops) return args.kept_factor;
    return kUnshift;
  }

  // P and dP -> dS, packed.
  __device__ __forceinline__ void differentiate(Packed& dscores, const Scores& scores, Scores& gradients,
                                                const Packed& p, int stage) const {
    if constexpr (Traits::kDrops) kept.keep(gradients);
    [[maybe_unused]] float sums[Scores::kThreadRows] = {};
#pragma unroll
    for (int j = 0; j < Scores::kColumnTiles; ++j) {
#pragma unroll
      for (int r = 0; r < Scores::kThreadRows; ++r) {
        const float2 probability = weight(scores, p, r, j);
        const float2 difference = less_delta(gradients, stage, r, j);
        const float2 dscore = {probability.x * difference.x, probability.y * difference.y};
        if constexpr (Traits::kSumsDscores) sums[r] += dscore.x + dscore.y;
        dscores.a[j / 2][j % 2 * 2 + r] = ptx::pack_in_order(dscore.x, dscore.y, Element{});
      }
    }
    if constexpr (Traits::kSumsDscores) DbiasOfKeys<Traits>{shared}.add(sums);
  }

 private:
  __device__ __forceinline__ float shift([[maybe_unused]] int r) const {
    if constexpr (Traits::kAlibi || Traits::kKeyBias) {
      return of_keys[r];
    } else {
      return args.shift;
    }
  }

  // dP - delta.
  __device__ __forceinline__ float2 less_delta(const Scores& gradients, int stage, int r, int j) const {
    const float2 dp = {gradients.at(r, j, 0), gradients.at(r, j, 1)};
    if constexpr (Traits::kConfig.adds_statistics) {
      return {dp.x * kUnshiftGradients, dp.y * kUnshiftGradients};
    } else {
      const float2 delta = statistic(stage, 1, j);
      return {fmaf(dp.x, factor(), -delta.x), fmaf(dp.y, factor(), -delta.y)};
    }
  }

  // A statistic of the queries of a column tile.
  __device__ __forceinline__ float2 statistic(int stage, int which, int j) const {
    return *reinterpret_cast<const float2*>(&shared.statistics[stage][which][Scores::column(j, 0)]);
  }

  __device__ __forceinline__ float2 weight(const Scores& scores, const Packed& p, int r, int j) const {
    if constexpr (kInRegisters) {
      return {scores.at(r, j, 0), scores.at(r, j, 1)};
    } else if constexpr (kKeepsWeights) {
      return ptx::unpack(weights.a[j / 2][j % 2 * 2 + r], __half{});
    } else {
      return ptx::unpack(p.a[j / 2][j % 2 * 2 + r], __half{});
    }
  }
};

}  // namespace flash_attn_ext::sm90
