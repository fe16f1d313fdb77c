// A warp's tile of scores whose rows are queries of several heads (PackGQA): which keys each row sees, and what
// modifies its scores.
//
// The formulas are those of kernels/score/, applied row by row. Rows differ in query and head, so biases, masks and
// dropout draws are addressed element by element. Biases and masks are fetched in a step of their own, so that the
// loads overlap those of the keys.
#pragma once

#include "kernels/schedule/row_tiles.cuh"
#include "kernels/score/score_mod.cuh"

namespace flash_attn_ext::sm80 {

// The bias of a thread's scores, with -inf where a mask hides them, or the mask where there is no bias.
// The bits are kept in the format of global memory, so that no instruction waits for the loads here.
template <class Scores>
struct FetchedBiasMask {
  uint32_t values[Scores::kThreadRows][Scores::kColumnTiles][2];
};

template <class Element, class Scores>
struct PackedRows {
  static constexpr int kThreadRows = Scores::kThreadRows;
  using BiasMask = FetchedBiasMask<Scores>;

  const attention::AttentionParams& p;
  const attention::Sequence& sequence;
  PackedRow at[kThreadRows];
  int begin[kThreadRows];  // the keys that the row sees; an empty interval where the row does not exist
  int end[kThreadRows];

  __device__ __forceinline__ PackedRows(const attention::AttentionParams& p, const attention::Sequence& sequence)
      : p(p), sequence(sequence) {}

  __device__ __forceinline__ void set(int r, const PackedRow& row, bool exists) {
    at[r] = row;
    const attention::Interval seen = p.visibility.keys_of<int>(row.query, sequence);
    begin[r] = exists ? static_cast<int>(seen.begin) : 0;
    end[r] = exists ? static_cast<int>(seen.end) : 0;
  }

  // Sets scores that are masked by position to -inf.
  __device__ __forceinline__ void hide_invisible(Scores& scores, int first_key) const {
    for_each_element<Scores>([&](int r, int, int j, int e, int column) {
      const int key = first_key + column;
      if (key < begin[r] || key >= end[r]) scores.at(r, j, e) = -INFINITY;
    });
  }

  // Issues the loads; `modify` waits for them.
  __device__ __forceinline__ void fetch(BiasMask& bias_mask, int first_key) const {
    const attention::BroadcastView& bias = p.score_mod.bias;
    const attention::BroadcastView& mask = p.score_mod.mask;
    if (!bias.present()) {
      if (mask.present()) read<uint8_t>(bias_mask, mask, first_key);
      return;
    }
    if (has_float32_bias()) {
      read<uint32_t>(bias_mask, bias, first_key);
    } else {
      read<uint16_t>(bias_mask, bias, first_key);
    }
    if (!mask.present()) return;
    BiasMask attends;
    read<uint8_t>(attends, mask, first_key);
    for_each_element<Scores>([&](int r, int, int j, int e, int) {
      if (attends.values[r][j][e] == 0) bias_mask.values[r][j][e] = bits_of(-INFINITY);
    });
  }

  // q.k -> score, for the softmax.
  __device__ __forceinline__ void modify(Scores& scores, const BiasMask& bias_mask, int first_key,
                                         bool folds_scale) const {
    const attention::ScoreMod& mod = p.score_mod;
    // The scale and the addition of the bias are one FMA where nothing comes between them.
    const bool scaled_later = mod.bias.present() && !changes_before_bias(mod);
    if (!folds_scale && !scaled_later) cap(scores, mod);
    if (mod.alibi.present()) add_alibi(scores, first_key);
    if (mod.bias.present()) {
      const float factor = scaled_later ? static_cast<float>(mod.scale) : 1.0f;
      for_each_element<Scores>([&](int r, int, int j, int e, int) {
        scores.at(r, j, e) = fmaf(scores.at(r, j, e), factor, bias_of(bias_mask.values[r][j][e]));
      });
    } else if (mod.mask.present()) {
      for_each_element<Scores>([&](int r, int, int j, int e, int) {
        if (bias_mask.values[r][j][e] == 0) scores.at(r, j, e) = -INFINITY;
      });
    }
    if (mod.intervals.present()) hide_outside_intervals(scores, first_key);
    if (mod.blocks.present()) hide_outside_blocks(scores, first_key);
  }

  // Sets the weights that dropout drops to 0. first_key: a multiple of the tile's keys, or of 32 if these are more.
  __device__ __forceinline__ void drop(Scores& weights, int first_key) const {
    constexpr int kSharing = Scores::kColumnTiles < 4 ? Scores::kColumnTiles : 4;  // column tiles that share draws
    static_assert(kSharing == 2 || Scores::kColumnTiles % kSharing == 0);
    const bool second_half = kSharing == 2 && first_key % attention::Dropout::kBlockKeys != 0;
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
#pragma unroll
      for (int first_j = 0; first_j < Scores::kColumnTiles; first_j += kSharing) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int64_t key = first_key + Scores::column(first_j, e);
          const attention::PhiloxCounter draws = p.dropout.draws(sequence.batch, at[r].head, at[r].query, key);
#pragma unroll
          for (int j = 0; j < kSharing; ++j) {
            const uint32_t word = second_half ? draws.word[(j + 2) % 4] : draws.word[j];
            if (!p.dropout.keeps(word, at[r].query / 8 % 2)) weights.at(r, first_j + j, e) = 0.0f;
          }
        }
      }
    }
  }

 private:
  __device__ __forceinline__ void add_alibi(Scores& scores, int first_key) const {
    const int64_t diagonal = p.visibility.diagonal(sequence);
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      const float slope = end[r] > begin[r] ? p.score_mod.alibi.at<float>(sequence.batch, at[r].head) : 0.0f;
      const auto origin = static_cast<float>(first_key - at[r].query - diagonal);
#pragma unroll
      for (int j = 0; j < Scores::kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const auto column = static_cast<float>(Scores::column(j, e));
          scores.at(r, j, e) += slope * attention::alibi_derivative(origin + column);
        }
      }
    }
  }

  __device__ __forceinline__ bool has_float32_bias() const {
    return sizeof(Element) == 4 || p.score_mod.bias.element == attention::ElementType::kFloat32;
  }
  // Conversions between a bias and its bits in memory, where 16-bit biases are the lower half.
  __device__ __forceinline__ float bias_of(uint32_t bits) const {
    if (has_float32_bias()) return __uint_as_float(bits);
    if constexpr (sizeof(Element) == 2) return ptx::to_float(static_cast<uint16_t>(bits), Element{});
    return 0.0f;
  }
  __device__ __forceinline__ uint32_t bits_of(float bias) const {
    if (has_float32_bias()) return __float_as_uint(bias);
    if constexpr (sizeof(Element) == 2) return ptx::pack(bias, 0.0f, Element{});
    return 0;
  }

  // Sets scores of keys that no interval of their row has to -inf.
  __device__ __forceinline__ void hide_outside_intervals(Scores& scores, int first_key) const {
    const attention::RowIntervals& intervals = p.score_mod.intervals;
    const int first = first_key + Scores::column(0, 0);
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      if (end[r] <= begin[r]) continue;  // the row may not exist
      const int32_t* row = intervals.row(sequence, at[r].head, at[r].query);
      uint32_t seen = 0;  // of four column tiles
#pragma unroll
      for (int j = 0; j < Scores::kColumnTiles; ++j) {
        if (j % 4 == 0) seen = intervals.word(row, first + 8 * j);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if ((seen >> (8 * (j % 4) + e) & 1u) == 0) scores.at(r, j, e) = -INFINITY;
        }
      }
    }
  }

  // Sets scores of keys that no block of their row has to -inf.
  __device__ __forceinline__ void hide_outside_blocks(Scores& scores, int first_key) const {
    const attention::BlockMask& blocks = p.score_mod.blocks;
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      if (end[r] <= begin[r]) continue;  // the row may not exist
      const uint8_t* row = blocks.row(sequence.batch, at[r].head, at[r].query);
      bool seen = true;  // four column tiles, which belong to one block
#pragma unroll
      for (int j = 0; j < Scores::kColumnTiles; ++j) {
        if (j % 4 == 0) seen = blocks.sees(row, first_key + 8 * j);
#pragma unroll
        for (int e = 0; e < 2; ++e) scores.at(r, j, e) = seen ? scores.at(r, j, e) : -INFINITY;
      }
    }
  }

  // Reads 0 where a row sees nothing, since the bias or mask may not exist there.
  template <class Value>
  __device__ __forceinline__ void read(BiasMask& bias_mask, const attention::BroadcastView& view, int first_key) const {
    const int first = first_key + Scores::column(0, 0);
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      const auto* row =
          static_cast<const Value*>(view.data) + view.offset({sequence.batch, at[r].head, at[r].query, first});
#pragma unroll
      for (int j = 0; j < Scores::kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int step = Scores::column(j, e) - Scores::column(0, 0);
          const bool seen = first + step >= begin[r] && first + step < end[r];
          bias_mask.values[r][j][e] = seen ? row[step * view.key_stride] : 0;
        }
      }
    }
  }
};

}  // namespace flash_attn_ext::sm80
