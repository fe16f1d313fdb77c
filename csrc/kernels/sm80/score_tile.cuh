// One warp's tile of scores, and everything that can happen to it between q.k and the softmax and back.
//
// Each step is a pass over the accumulator's registers behind a branch that all threads take alike, so that a kernel
// with every feature stays small and a call pays for the features it uses.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attention/params.h"
#include "kernels/tile_config.h"
#include "ptx/math.h"
#include "tile/fragment.h"

namespace flash_attn_ext::sm80 {

enum class Score { kPlain, kExtended };  // scale only, or everything

// What a kernel is compiled for.
template <class ElementType, int kHeadDimValue, Score kScoreValue>
struct KernelTraits {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimValue;
  static constexpr Score kScore = kScoreValue;
  static constexpr bool kExtended = kScore == Score::kExtended;
};

enum class Rows { kQueries, kKeys };  // what the rows of a score tile are; its columns are the other

struct DeviceMath {
  // Within 2^-21 of tanh: scores are products of 16-bit numbers.
  __device__ static float tanh(float x) { return 1.0f - __fdividef(2.0f, 1.0f + ptx::exp2(x * (2.0f * kLog2e))); }
  static constexpr float kLog2e = 1.4426950408889634f;
};
inline constexpr float kLog2e = DeviceMath::kLog2e;

// Identifies the head that a block works on.
struct WorkItem {
  attention::Sequence sequence;
  int64_t head;
  int64_t key_head;
};

struct ColumnRange {
  int begin;
  int end;
  __device__ __forceinline__ bool contains(int column) const { return begin <= column && column < end; }
};

// Calls function(r, row, j, e, column) for each element that the thread holds.
template <class Acc, class Function>
__device__ __forceinline__ void for_each_element(Function&& function) {
#pragma unroll
  for (int r = 0; r < Acc::kThreadRows; ++r) {
    const int row = Acc::row(r);
#pragma unroll
    for (int j = 0; j < Acc::kColumnTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) function(r, row, j, e, Acc::column(j, e));
    }
  }
}

// The tile whose first element is (first_row, first_column), positions inside the sequence: multiples of 16 and 32.
template <Rows kRows, class Acc>
struct ScoreTile {
  using Accumulator = Acc;
  static_assert(Acc::kColumnTiles % 4 == 0);
  static constexpr int kColumns = 8 * Acc::kColumnTiles;

  const attention::AttentionParams& p;
  const WorkItem& item;
  int64_t first_row;
  int64_t first_column;

  __device__ __forceinline__ int64_t query(int row, int column) const {
    return kRows == Rows::kQueries ? first_row + row : first_column + column;
  }
  __device__ __forceinline__ int64_t key(int row, int column) const {
    return kRows == Rows::kQueries ? first_column + column : first_row + row;
  }

  // The columns, relative to the tile, that a row sees (or is seen by).
  __device__ __forceinline__ ColumnRange visible_columns(int row) const {
    const attention::Interval seen = kRows == Rows::kQueries ? p.visibility.keys_of(first_row + row, item.sequence)
                                                             : p.visibility.queries_of(first_row + row, item.sequence);
    return {static_cast<int>(min(max(seen.begin - first_column, int64_t{0}), int64_t{kColumns})),
            static_cast<int>(min(max(seen.end - first_column, int64_t{0}), int64_t{kColumns}))};
  }

  // What a row may not see becomes -inf.
  __device__ __forceinline__ void hide_invisible(Acc& scores) const {
#pragma unroll
    for (int r = 0; r < Acc::kThreadRows; ++r) {
      const ColumnRange seen = visible_columns(Acc::row(r));
#pragma unroll
      for (int j = 0; j < Acc::kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (!seen.contains(Acc::column(j, e))) scores.at(r, j, e) = -INFINITY;
        }
      }
    }
  }

  // capped -> score: ALiBi, bias and mask.
  __device__ __forceinline__ void add_terms(Acc& scores) const {
    if (p.score_mod.alibi.present()) add_alibi(scores);
    if (p.score_mod.bias.present()) {
      switch (p.score_mod.bias.element) {
        case attention::ElementType::kFloat32:
          add_bias<float>(scores);
          break;
        case attention::ElementType::kBFloat16:
          add_bias<__nv_bfloat16>(scores);
          break;
        default:  // host checks leave no other type
          add_bias<__half>(scores);
      }
    }
    if (p.score_mod.mask.present()) apply_mask(scores);
  }

  // One bit an element, in for_each_element's order: whether dropout keeps it. A Philox call serves 8 elements (4 where
  // rows are keys), which lie 8 apart in both directions and so belong to one thread.
  struct KeepBits {
    static constexpr int kCount = Acc::kThreadRows * Acc::kColumnTiles * 2;
    uint32_t words[(kCount + 31) / 32];

    __device__ __forceinline__ static int index(int r, int j, int e) { return (r * Acc::kColumnTiles + j) * 2 + e; }
    __device__ __forceinline__ bool at(int r, int j, int e) const {
      return words[index(r, j, e) / 32] >> (index(r, j, e) % 32) & 1u;
    }
  };

  __device__ __forceinline__ KeepBits draw() const {
    constexpr int kJ = kRows == Rows::kQueries ? 4 : 2;  // column tiles that share a call
    KeepBits keep = {};
#pragma unroll
    for (int i = 0; i < Acc::kRowTiles; ++i) {
#pragma unroll
      for (int first_j = 0; first_j < Acc::kColumnTiles; first_j += kJ) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int row = Acc::row(2 * i);
          const int column = Acc::column(first_j, e);
          const attention::PhiloxCounter draws =
              p.dropout.draws(item.sequence.batch, item.head, query(row, column), key(row, column));
#pragma unroll
          for (int n = 0; n < 2 * kJ; ++n) {
            const int r = 2 * i + n % 2;
            const int j = first_j + n / 2;
            const bool kept =
                p.dropout.keeps(draws, query(Acc::row(r), Acc::column(j, e)), key(Acc::row(r), Acc::column(j, e)));
            keep.words[KeepBits::index(r, j, e) / 32] |= uint32_t{kept} << (KeepBits::index(r, j, e) % 32);
          }
        }
      }
    }
    return keep;
  }

 private:
  __device__ __forceinline__ void add_alibi(Acc& scores) const {
    const float slope = p.score_mod.alibi.at<float>(item.sequence.batch, item.head);
    // Key minus diagonal key of the tile's first element; the rest is small numbers.
    const int64_t diagonal = p.visibility.diagonal(item.sequence);
    const float origin = static_cast<float>(key(0, 0) - query(0, 0) - diagonal);
    for_each_element<Acc>([&](int r, int row, int j, int e, int column) {
      const int step = kRows == Rows::kQueries ? column - row : row - column;
      scores.at(r, j, e) -= slope * fabsf(origin + static_cast<float>(step));
    });
  }

  // How many rows and columns of the tile exist, so that a bias or mask may be read there.
  __device__ __forceinline__ int num_rows() const {
    const int64_t length = kRows == Rows::kQueries ? item.sequence.num_queries : item.sequence.num_keys;
    return static_cast<int>(min(length - first_row, int64_t{16 * Acc::kRowTiles}));
  }
  __device__ __forceinline__ int num_columns() const {
    const int64_t length = kRows == Rows::kQueries ? item.sequence.num_keys : item.sequence.num_queries;
    return static_cast<int>(min(length - first_column, int64_t{kColumns}));
  }

  // Calls function(score, term) for each score that exists and its element of a bias or mask. What does not exist is
  // hidden by visibility.
  template <class Element, class Function>
  __device__ __forceinline__ void for_each_term(Acc& scores, const attention::BroadcastView& view,
                                                Function&& function) const {
    const bool queries = kRows == Rows::kQueries;
    const int64_t row_stride = queries ? view.query_stride : view.key_stride;
    const int64_t column_stride = queries ? view.key_stride : view.query_stride;
    const Element* first =
        static_cast<const Element*>(view.data) + view.offset({item.sequence.batch, item.head, query(0, 0), key(0, 0)});
    const int rows = num_rows();
    const int columns = num_columns();
    const bool neighbours = column_stride == 1 && columns == kColumns && row_stride % 2 == 0 &&
                            reinterpret_cast<uintptr_t>(first) % (2 * sizeof(Element)) == 0;
#pragma unroll
    for (int r = 0; r < Acc::kThreadRows; ++r) {
      if (Acc::row(r) >= rows) continue;
      const Element* row = first + Acc::row(r) * row_stride;
      if (neighbours) {  // two at a time
        struct alignas(2 * sizeof(Element)) Pair {
          Element values[2];
        };
        const Pair* pairs = reinterpret_cast<const Pair*>(row + Acc::column(0, 0));
#pragma unroll
        for (int j = 0; j < Acc::kColumnTiles; ++j) {
          const Pair pair = pairs[4 * j];
          function(scores.at(r, j, 0), pair.values[0]);
          function(scores.at(r, j, 1), pair.values[1]);
        }
      } else {
#pragma unroll
        for (int j = 0; j < Acc::kColumnTiles; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int column = Acc::column(j, e);
            if (column < columns) function(scores.at(r, j, e), row[column * column_stride]);
          }
        }
      }
    }
  }

  template <class Element>
  __device__ __forceinline__ void add_bias(Acc& scores) const {
    for_each_term<Element>(scores, p.score_mod.bias,
                           [](float& score, Element bias) { score += static_cast<float>(bias); });
  }

  __device__ __forceinline__ void apply_mask(Acc& scores) const {
    for_each_term<uint8_t>(scores, p.score_mod.mask, [](float& score, uint8_t attend) {
      if (attend == 0) score = -INFINITY;
    });
  }
};

}  // namespace flash_attn_ext::sm80
