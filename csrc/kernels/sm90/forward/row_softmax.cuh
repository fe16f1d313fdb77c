// The online softmax of a warp's 16 rows, with two policies for the row maximum. Both keep the softmax short enough to
// hide behind GEMMs in flight.
#pragma once

#include "kernels/score/softmax.cuh"

namespace flash_attn_ext::sm90 {

// When O and the sum are rescaled to a larger row maximum.
enum class Rescale {
  // Never: the row maximum is that of the first tile of keys. Later tiles need neither a maximum nor a rescaled O, and
  // nothing is lost while the row's sum stays in range, since P, O and the sum are float32.
  kNever,
  // When the row maximum, in units of log2, has grown by more than rescale_threshold_log2 (the rescale threshold of
  // FlashAttention-4).
  kAboveThreshold,
};

// A row of Rescale::kNever whose sum leaves this range is recomputed with kAboveThreshold.
inline constexpr float kLeastSum = 0x1p-30f;
inline constexpr float kLargestSum = 0x1p64f;

// The overlapped callback of a softmax that has nothing to do between its exponentials.
struct NothingOverlapped {
  __device__ __forceinline__ void operator()(float) const {}
};

// kTracksRowMax: whether it also keeps row_max, the largest score, which m is not under either policy.
template <bool kTracksRowMax>
struct RowSoftmax {
  float m[2];       // the row maximum: of q.k where the scale is folded into the exponent, else of finished scores
  float l[2];       // this thread's share of the sum of exp
  float kept[2];    // the share of l that dropout keeps
  float factor[2];  // what O is multiplied by where `raised`
  // Of row lane % 2, since registers are short. kAboveThreshold: the largest score so far, in units of m. kNever: the
  // largest P so far of two threads' keys, since no maximum of scores is computed; P grows with its score.
  float row_max;
  bool raised;  // whether the maximum of some row of the warp has grown past the threshold

  // scores -> P for the first tile of keys.
  template <Rescale kRescale, class Scores>
  __device__ __forceinline__ void begin(Scores& scores, const Exponent& exponent) {
    raised = false;
    factor[0] = factor[1] = 1.0f;
    l[0] = l[1] = 0.0f;
    kept[0] = kept[1] = 0.0f;
    float maximum[2];
    row_maxima(maximum, scores);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      m[r] = kRescale == Rescale::kNever && maximum[r] == -INFINITY ? 0.0f : maximum[r];
    }
    if constexpr (kTracksRowMax) row_max = kRescale == Rescale::kNever ? 0.0f : of_own_row(maximum);
    exponentiate(scores, exponent, NothingOverlapped{});
  }

  // The same for a later tile. overlapped(value) is called between the exponentials, once those that `value` depends on
  // are computed.
  template <Rescale kRescale, class Scores, class Overlapped>
  __device__ __forceinline__ void update(Scores& scores, const Exponent& exponent, float rescale_threshold_log2,
                                         Overlapped&& overlapped) {
    if constexpr (kRescale == Rescale::kAboveThreshold) {
      float maximum[2];
      row_maxima(maximum, scores);
      if constexpr (kTracksRowMax) row_max = fmaxf(row_max, of_own_row(maximum));
      raise(maximum, exponent.c, rescale_threshold_log2);
    }
    exponentiate(scores, exponent, overlapped);
  }

  // Keeps the largest P of a tile. Called when no GEMM reads the P of the tile before any more, because
  // registers are short until then.
  template <Rescale kRescale, class Scores>
  __device__ __forceinline__ void track_row_max(const Scores& weights) {
    if constexpr (kTracksRowMax && kRescale == Rescale::kNever) {
      float of_tile[2] = {0.0f, 0.0f};
#pragma unroll
      for (int j = 0; j < Scores::kColumnTiles; ++j) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          of_tile[r] = ptx::max_of_positive(of_tile[r], weights.at(r, j, 0), weights.at(r, j, 1));
        }
      }
      const float of_neighbour = __shfl_xor_sync(0xFFFFFFFFu, tile::lane() % 2 == 0 ? of_tile[1] : of_tile[0], 1);
      row_max = ptx::max_of_positive(row_max, of_own_row(of_tile), of_neighbour);
    }
  }

  // Adds P after dropout, where dropped weights are 0.
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

  // Depends on everything above, so that a wait for it waits for the whole softmax.
  __device__ __forceinline__ float total() const { return l[0] + l[1] + (kept[0] + kept[1]); }

  template <class... Sums>
  __device__ __forceinline__ void rescale(Sums&... sums) const {
    if (!raised) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) (sums.scale_row(r, factor[r]), ...);
  }

  // The state of a whole row, whose sum is spread over the four threads of a quad. scale: what was folded into the
  // exponent.
  __device__ __forceinline__ attention::SoftmaxState<float> state_of(int r, float scale) const {
    const float sum = tile::quad_sum(l[r]);
    return {.m = sum == 0.0f ? -INFINITY : m[r] * scale, .l = sum};
  }

  // row_max of row lane % 2, which has seen a key. scale: as above.
  template <Rescale kRescale>
  __device__ __forceinline__ float own_row_max(float scale) const {
    const float of_row = of_own_row(m) * scale;
    if constexpr (!kTracksRowMax) return of_row;
    const float whole = fmaxf(row_max, __shfl_xor_sync(0xFFFFFFFFu, row_max, 2));
    return kRescale == Rescale::kNever ? of_row + ptx::log(whole) : whole * scale;
  }

 private:
  __device__ __forceinline__ static float of_own_row(const float (&of_rows)[2]) {
    return tile::lane() % 2 == 0 ? of_rows[0] : of_rows[1];
  }
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

  __device__ __forceinline__ void raise(const float (&maximum)[2], float c, float rescale_threshold_log2) {
    const float candidate[2] = {fmaxf(m[0], maximum[0]), fmaxf(m[1], maximum[1])};
    // A row that has seen nothing yet compares NaN, which is false.
    const bool grew =
        (candidate[0] - m[0]) * c > rescale_threshold_log2 || (candidate[1] - m[1]) * c > rescale_threshold_log2;
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

  template <class Scores, class Overlapped>
  __device__ __forceinline__ void exponentiate(Scores& scores, const Exponent& exponent, Overlapped&& overlapped) {
    constexpr int kBefore = Scores::kColumnTiles / 4;  // column tiles whose exponentials precede the callback
    const float c = exponent.c;
    const float shift[2] = {shift_of(m[0]), shift_of(m[1])};
    const float scaled[2] = {shift[0] * c, shift[1] * c};
    float sums[2][2] = {};
    const auto each = [&](auto&& exponent_of) {
#pragma unroll
      for (int j = 0; j < Scores::kColumnTiles; ++j) {
        if (j == kBefore) overlapped(l[0] + (sums[0][0] + sums[0][1]) + (sums[1][0] + sums[1][1]));
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
