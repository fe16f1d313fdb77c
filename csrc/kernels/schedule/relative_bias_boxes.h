// A relative-position bias, in the form in which the TMA reads boxes of it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/division.h"
#include "attention/params.h"

namespace flash_attn_ext {

// All boxes of kRows queries whose first query is a multiple of kRows are the same, but for a shift of their keys. So
// there are kRows rows for each head of the bias: the column c of row r holds the value of key - query =
// c - first_column - r.
struct RelativeBiasBoxes {
  static constexpr int kRows = 64;
  static constexpr int64_t kChunk = 8;  // elements of 16 bits in 16 bytes

  int first_column = 0;  // of key 0, in the box of the last queries
  int64_t columns = 0;
  int64_t heads = 0;

  int64_t head_stride() const { return kRows * columns; }
  int64_t bytes() const { return heads * head_stride() * 2; }
};

inline RelativeBiasBoxes relative_bias_boxes(const attention::AttentionParams& p) {
  const int64_t last_box = std::max<int64_t>(p.sequences.max_seqlen_q - 1, 0) / RelativeBiasBoxes::kRows;
  RelativeBiasBoxes boxes;
  boxes.first_column = static_cast<int>(last_box * RelativeBiasBoxes::kRows);
  boxes.columns = attention::ceil_div(boxes.first_column + p.sequences.max_seqlen_k, RelativeBiasBoxes::kChunk) *
                  RelativeBiasBoxes::kChunk;
  boxes.heads = p.score_mod.bias.head_stride == 0 ? 1 : p.num_heads_q;
  return boxes;
}

}  // namespace flash_attn_ext
