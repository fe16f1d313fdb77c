// One warp's tile of scores, and everything that can happen to it between q.k and the softmax and back.
//
// Each step is a pass over the accumulator's registers behind a branch that all threads take alike, so that a kernel
// with every feature stays small and a call pays for the features it uses.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attention/params.h"
#include "kernels/schedule/schedule.cuh"
#include "kernels/schedule/work_item.h"
#include "kernels/score/visible_columns.cuh"
#include "ptx/math.h"
#include "tile/accumulator.h"

namespace flash_attn_ext {

inline constexpr float kLog2e = 1.4426950408889634f;

struct DeviceMath {
  // Within 2^-21 of tanh.
  __device__ static float tanh(float x) { return 1.0f - __fdividef(2.0f, 1.0f + ptx::exp2(x * (2.0f * kLog2e))); }
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

template <class Element>
struct alignas(2 * sizeof(Element)) ElementPair {
  Element low;
  Element high;
};

// Assigned where the bias is -inf: adding it would leave a NaN in k visible.
__device__ __forceinline__ float biased(float score, float bias) { return bias == -INFINITY ? bias : score + bias; }

// A thread's elements of a 16-bit bias and of a mask, two to a register.
template <class Acc>
struct TileTerms {
  bool masked;  // the mask has to be applied
  uint32_t bias[Acc::kThreadRows][Acc::kColumnTiles];
  uint32_t mask[Acc::kThreadRows][Acc::kColumnTiles];

  template <class Element>
  __device__ __forceinline__ void add_bias(Acc& scores, Element) const {
    for_each_element<Acc>([&](int r, int, int j, int e, int) {
      const auto bits = static_cast<uint16_t>(e == 0 ? bias[r][j] : bias[r][j] >> 16);
      scores.at(r, j, e) = biased(scores.at(r, j, e), ptx::to_float(bits, Element{}));
    });
  }

  __device__ __forceinline__ void apply_mask(Acc& scores) const {
    for_each_element<Acc>([&](int r, int, int j, int e, int) {
      if ((mask[r][j] & (e == 0 ? 0xFFu : 0xFF00u)) == 0) scores.at(r, j, e) = -INFINITY;
    });
  }
};

// The tile whose first element is (first_row, first_column), positions inside the sequence: multiples of 16.
template <Rows kRows, class Acc>
struct ScoreTile {
  using Accumulator = Acc;
  static constexpr Rows kRowsAre = kRows;
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

  __device__ __forceinline__ VisibleColumns<Acc> visible() const {
    return VisibleColumns<Acc>(kRows == Rows::kQueries
                                   ? p.visibility.keys_of_rows(first_row, first_column, item.sequence)
                                   : p.visibility.queries_of_rows(first_row, first_column, item.sequence));
  }

  // Calls function(r, j, e, visible) for each of the thread's elements.
  template <class Function>
  __device__ __forceinline__ void for_each_visibility(Function&& function) const {
    const VisibleColumns<Acc> columns = visible();
#pragma unroll
    for (int r = 0; r < Acc::kThreadRows; ++r) {
      const uint32_t row = columns.of_row(r);
#pragma unroll
      for (int j = 0; j < Acc::kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) function(r, j, e, columns.is_visible(row, j, e));
      }
    }
  }

  // What a row may not see becomes -inf.
  __device__ __forceinline__ void hide_invisible(Acc& scores) const {
    for_each_visibility(
        [&](int r, int j, int e, bool visible) { scores.at(r, j, e) = visible ? scores.at(r, j, e) : -INFINITY; });
  }

  // product -> capped.
  __device__ __forceinline__ void cap(Acc& scores) const {
    const auto transform = p.score_mod.transform<float, DeviceMath>();
    if (p.score_mod.softcap == 0.0) {
      for_each_element<Acc>([&](int r, int, int j, int e, int) { scores.at(r, j, e) *= transform.scale; });
    } else {
      for_each_element<Acc>(
          [&](int r, int, int j, int e, int) { scores.at(r, j, e) = transform.cap(scores.at(r, j, e)); });
    }
  }

  // What add_terms will need from memory, asked for early.
  __device__ __forceinline__ TileTerms<Acc> load_terms(bool with_mask) const {
    TileTerms<Acc> terms;
    terms.masked = with_mask;
    const auto& bias = p.score_mod.bias;
    if (bias.present() && bias.element != attention::ElementType::kFloat32) {
      load_pairs<uint16_t>(bias,
                           [&](int r, int j, uint32_t low, uint32_t high) { terms.bias[r][j] = low | high << 16; });
    }
    if (with_mask) {
      load_pairs<uint8_t>(p.score_mod.mask,
                          [&](int r, int j, uint32_t low, uint32_t high) { terms.mask[r][j] = low | high << 8; });
    }
    return terms;
  }

  // capped -> score: ALiBi, bias and mask.
  __device__ __forceinline__ void add_terms(Acc& scores, const TileTerms<Acc>& terms) const {
    if (p.score_mod.alibi.present()) add_alibi(scores);
    if (p.score_mod.bias.present()) {
      switch (p.score_mod.bias.element) {
        case attention::ElementType::kFloat32:
          add_float32_bias(scores);
          break;
        case attention::ElementType::kBFloat16:
          terms.add_bias(scores, __nv_bfloat16{});
          break;
        default:  // host checks leave no other type
          terms.add_bias(scores, __half{});
      }
    }
    if (terms.masked) terms.apply_mask(scores);
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

  // The tile's rows begin at a multiple of 16, its columns at one of 16: where in a block of draws is known but for
  // whether keys begin in the block's second half.
  // Calls function(r, j, e, kept) for each element.
  template <class Function>
  __device__ __forceinline__ void draw(Function&& function) const {
    constexpr bool kQueries = kRows == Rows::kQueries;
    constexpr int kShared = kQueries ? 4 : 2;  // column tiles that share a call
    constexpr int kJ = kShared < Acc::kColumnTiles ? kShared : Acc::kColumnTiles;
    const uint64_t seed = static_cast<uint64_t>(*p.dropout.seed);
    const auto batch = static_cast<uint32_t>(item.sequence.batch);
    const auto head = static_cast<uint32_t>(item.head);
    const auto quad_row = static_cast<uint32_t>(tile::lane() / 4);
    const auto quad_column = static_cast<uint32_t>(tile::lane() % 4 * 2);
    // Tiles of keys begin at multiples of their length.
    constexpr bool kWholeBlocks = kQueries && kColumns % attention::Dropout::kBlockKeys == 0;
    const bool second_half = !kWholeBlocks && key(0, 0) % attention::Dropout::kBlockKeys != 0;
#pragma unroll
    for (int i = 0; i < Acc::kRowTiles; ++i) {
#pragma unroll
      for (int first_j = 0; first_j < Acc::kColumnTiles; first_j += kJ) {
        const uint32_t row_block = kQueries ? attention::Dropout::query_block(query(16 * i, 0))
                                            : attention::Dropout::key_block(key(16 * i, 0));
        const uint32_t column_block = kQueries ? attention::Dropout::key_block(key(0, 8 * first_j))
                                               : attention::Dropout::query_block(query(0, 8 * first_j));
        const bool upper = second_half != (!kQueries && i % 2 == 1);
        attention::PhiloxCounter draws[2];  // of neighbouring columns
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const uint32_t row_counter = row_block * 8 + quad_row;
          const uint32_t column_counter = column_block * 8 + quad_column + e;
          draws[e] = attention::Dropout::counter(batch, head, kQueries ? row_counter : column_counter,
                                                 kQueries ? column_counter : row_counter);
        }
        attention::philox_4x32_7(draws, seed);
#pragma unroll
        for (int n = 0; n < 4 * kJ; ++n) {
          const int e = n % 2;
          const int half = n / 2 % 2;
          const int j = first_j + n / 4;
          const int key_eighth = kQueries ? n / 4 % 4 : half;
          const uint32_t word = draws[e].word[upper ? (key_eighth + 2) % 4 : key_eighth];
          function(2 * i + half, j, e, p.dropout.keeps(word, kQueries ? half : n / 4));
        }
      }
    }
  }

  __device__ __forceinline__ KeepBits keep_bits() const {
    KeepBits keep = {};
    draw([&](int r, int j, int e, bool kept) {
      keep.words[KeepBits::index(r, j, e) / 32] |= uint32_t{kept} << (KeepBits::index(r, j, e) % 32);
    });
    return keep;
  }

  __device__ __forceinline__ void add_alibi(Acc& scores) const {
    const float slope = p.score_mod.alibi.at<float>(item.sequence.batch, item.head);
    // Key minus diagonal key of the tile's first element; the rest is small numbers.
    const int64_t diagonal = p.visibility.diagonal(item.sequence);
    const float origin = static_cast<float>(key(0, 0) - query(0, 0) - diagonal);
    for_each_element<Acc>([&](int r, int row, int j, int e, int column) {
      const int step = kRows == Rows::kQueries ? column - row : row - column;
      scores.at(r, j, e) -= slope * fabs(origin + static_cast<float>(step));
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

  // Calls function(r, j, low, high) with neighbouring elements of a bias or mask; 0 stands for those that do not exist,
  // which visibility hides.
  template <class Element, class Function>
  __device__ __forceinline__ void load_pairs(const attention::BroadcastView& view, Function&& function) const {
    constexpr bool kQueries = kRows == Rows::kQueries;
    const int64_t row_stride = kQueries ? view.query_stride : view.key_stride;
    const int64_t column_stride = kQueries ? view.key_stride : view.query_stride;
    const Element* origin =
        static_cast<const Element*>(view.data) + view.offset({item.sequence.batch, item.head, query(0, 0), key(0, 0)});
    const Element* first = origin + Acc::row(0) * row_stride + Acc::column(0, 0) * column_stride;
    const int rows = num_rows() - Acc::row(0);
    const int columns = num_columns() - Acc::column(0, 0);
    const bool whole = num_rows() == 16 * Acc::kRowTiles && num_columns() == kColumns;
    // Loops of their own, so that the common ones test nothing.
    if (whole && column_stride == 1 && row_stride % 2 == 0 &&
        reinterpret_cast<uintptr_t>(origin) % (2 * sizeof(Element)) == 0) {
      for_each_pair([&](int r, int j) {
        const auto* row = reinterpret_cast<const ElementPair<Element>*>(first + Acc::row_step(r) * row_stride);
        const ElementPair<Element> pair = row[4 * j];
        function(r, j, pair.low, pair.high);
      });
    } else if (whole) {
      for_each_pair([&](int r, int j) {
        const Element* element = first + Acc::row_step(r) * row_stride + 8 * j * column_stride;
        function(r, j, element[0], element[column_stride]);
      });
    } else {
      for_each_pair([&](int r, int j) {
        const Element* element = first + Acc::row_step(r) * row_stride + 8 * j * column_stride;
        const bool exists = Acc::row_step(r) < rows;
        const Element low = exists && Acc::column_step(j, 0) < columns ? element[0] : Element{};
        const Element high = exists && Acc::column_step(j, 1) < columns ? element[column_stride] : Element{};
        function(r, j, low, high);
      });
    }
  }

  // Calls function(r, j) for each pair of neighbours that the thread holds.
  template <class Function>
  __device__ __forceinline__ static void for_each_pair(Function&& function) {
#pragma unroll
    for (int r = 0; r < Acc::kThreadRows; ++r) {
#pragma unroll
      for (int j = 0; j < Acc::kColumnTiles; ++j) function(r, j);
    }
  }

  // Straight from memory: it would fill as many registers as the scores.
  __device__ __forceinline__ void add_float32_bias(Acc& scores) const {
    load_pairs<float>(p.score_mod.bias, [&](int r, int j, float low, float high) {
      scores.at(r, j, 0) = biased(scores.at(r, j, 0), low);
      scores.at(r, j, 1) = biased(scores.at(r, j, 1), high);
    });
  }
};

}  // namespace flash_attn_ext
