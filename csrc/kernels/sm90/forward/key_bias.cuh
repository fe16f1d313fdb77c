// A key bias in Hopper's forward kernels: an augmented column of the QK GEMM for each key, and the repair of rows that
// see nothing but low biases.
#pragma once

#include <cstdint>

#include "attention/key_bias.h"
#include "attention/params.h"
#include "kernels/common/rows/attention_rows.cuh"
#include "kernels/common/rows/warp_rows.cuh"

namespace flash_attn_ext::sm90 {

// Why a warp's rows are repaired.
enum class Repair : uint8_t {
  kNone,
  kNotFinite,      // a result is not finite, or a score beside a key bias is beyond kMostScore
  kInexactScores,  // the largest score of a row is too far from what was subtracted from the biases
};

// Tensor cores truncate sums. At this distance from what was subtracted from the biases, that changes a weight by
// 2^-11. Rows whose scores are farther below, or above 0 where nothing was subtracted, are repaired.
inline constexpr float kMostFromMaximum = 0x1p12f;

// The augmented column of a key. All low biases that dominate q.k are the same power of two, below all others, so that
// the softmax weighs keys that have them equally, whatever the scale. A NaN stays.
template <class Columns>
__device__ __forceinline__ uint4 key_bias_column(float bias, float inverse_scale) {
  constexpr float kLowest = -0x1p112f;
  if (bias == -INFINITY) return Columns::hidden_row();
  return Columns::row(bias <= -attention::kLeastDominant ? kLowest : bias * inverse_scale);
}

// The bias of a head's first keys, and the end of those that have it or are hidden.
struct CommonBias {
  float value;
  int end;

  // Of keys [begin, end).
  template <class Element>
  __device__ __forceinline__ static CommonBias of(const Element* of_head, int begin, int end) {
    float value = -INFINITY;
#pragma unroll 1
    for (int first = begin; first < end; first += tile::kWarpSize) {
      const int key = first + tile::lane();
      const float own = key < end ? static_cast<float>(of_head[key]) : -INFINITY;
      const uint32_t visible = __ballot_sync(common::kAllLanes, own != -INFINITY);
      if (value == -INFINITY && visible != 0) value = __shfl_sync(common::kAllLanes, own, __ffs(visible) - 1);
      const uint32_t others = __ballot_sync(common::kAllLanes, own != -INFINITY && own != value);
      if (others != 0) return {value, first + __ffs(others) - 1};
    }
    return {value, end};
  }
};

// What is subtracted from the biases of a work tile, and how far from it a row's scores may be.
struct ScoreRange {
  float maximum;
  float most_distance;
};

// For a warp's rows, of which the scores of some have lost digits. Returns a bit for each row that has to be
// recomputed. A row that sees nothing but one low bias that dominates q.k does not, if nothing was subtracted: O is a
// mean of v, and the residual is the logarithm of the number of keys. Only its LSE is replaced, unless that is a
// sink's, and its row_max, if that is present.
template <class Element>
__device__ __forceinline__ uint32_t repair_statistics(const attention::BasicForwardParams& p,
                                                      const attention::StatisticView& row_max,
                                                      const common::HeadRows& head, const attention::Interval& rows,
                                                      const ScoreRange& range) {
  const attention::Interval keys = p.visibility.keys_of_tile(rows, head.sequence);
  const attention::BroadcastView& view = p.score_mod.bias;
  const int64_t of_head = view.offset({head.sequence.batch, head.head, 0, 0});
  const auto first_key = static_cast<int>(keys.begin);
  const auto end_key = static_cast<int>(keys.end);
  const CommonBias bias = view.element == attention::ElementType::kFloat32
                              ? CommonBias::of(static_cast<const float*>(view.data) + of_head, first_key, end_key)
                              : CommonBias::of(static_cast<const Element*>(view.data) + of_head, first_key, end_key);
  const float sink = p.sink == nullptr ? -INFINITY : static_cast<const float*>(p.sink)[head.head];
  const bool is_dominant = bias.value <= -attention::kLeastDominant && fabsf(range.maximum) <= attention::kMostScore;
  const bool has_lse = sink == -INFINITY ? range.maximum == 0.0f : fabsf(sink) < attention::kLeastDominant / 2;
  bool is_recomputed = false;
  const int64_t query = rows.begin + tile::lane();
  if (query < rows.end) {
    const auto at = [&](const attention::StatisticView& statistic) {
      return statistic.at<float>(head.sequence.batch, head.head, head.sequence.query_begin + query);
    };
    // A row that is not far is exact, or a sink has all its weight: the LSE exceeds the maximum by a logarithm.
    const bool is_far = !(fabsf(*at(p.lse) - range.maximum) <= range.most_distance / 2);
    if (is_dominant && has_lse && p.visibility.keys_of(query, head.sequence).end <= bias.end) {
      // An LSE of -inf: q.k is -inf for all keys, or all of them are hidden.
      if (sink == -INFINITY && *at(p.lse) != -INFINITY) *at(p.lse) = bias.value;
      if (row_max.present() && *at(row_max) != -INFINITY) *at(row_max) = bias.value;
    } else {
      const bool is_low = row_max.present() && *at(row_max) <= -attention::kLeastDominant && *at(row_max) != -INFINITY;
      is_recomputed = is_far || is_low;
    }
  }
  return __ballot_sync(common::kAllLanes, is_recomputed);
}

}  // namespace flash_attn_ext::sm90
