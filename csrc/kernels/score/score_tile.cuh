// One warp's tile of scores: its position, which of its elements exist, and which are visible.
//
// Each feature that changes a score (score_mod.cuh, bias_mask.cuh, dropout.cuh) is a pass over the accumulator's
// registers behind a uniform branch. So a kernel with every feature stays small, and a call pays only for those that it
// uses.
#pragma once

#include "attention/params.h"
#include "kernels/schedule/head_tiles.h"
#include "kernels/schedule/schedule.cuh"
#include "kernels/score/visible_columns.cuh"
#include "ptx/pin.h"
#include "tile/accumulator.h"

namespace flash_attn_ext {

inline constexpr float kLog2e = 1.4426950408889634f;

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

// The tile whose first element is (first_row, first_column): positions inside the sequence, and multiples of 16.
template <Rows kRows, class Acc>
struct ScoreTile {
  using Accumulator = Acc;
  using Visible = VisibleColumns<Acc::kThreadRows, Acc::kColumnTiles>;
  static constexpr bool kRowsAreQueries = kRows == Rows::kQueries;
  static constexpr int kRowCount = 16 * Acc::kRowTiles;
  static constexpr int kColumns = 8 * Acc::kColumnTiles;
  static constexpr int kQueries = kRowsAreQueries ? kRowCount : kColumns;
  static constexpr int kKeys = kRowsAreQueries ? kColumns : kRowCount;

  const attention::AttentionParams& p;
  const HeadCoord& coord;
  int64_t first_row;
  int64_t first_column;

  __device__ __forceinline__ int64_t query(int row, int column) const {
    return kRowsAreQueries ? first_row + row : first_column + column;
  }
  __device__ __forceinline__ int64_t key(int row, int column) const {
    return kRowsAreQueries ? first_column + column : first_row + row;
  }
  __device__ __forceinline__ attention::Coordinate first() const {
    return {coord.sequence.batch, coord.head, query(0, 0), key(0, 0)};
  }

  // How many queries and keys of the tile exist, so that a bias or mask may be read there.
  __device__ __forceinline__ int num_queries() const {
    return static_cast<int>(min(coord.sequence.num_queries - query(0, 0), int64_t{kQueries}));
  }
  __device__ __forceinline__ int num_keys() const {
    return static_cast<int>(min(coord.sequence.num_keys - key(0, 0), int64_t{kKeys}));
  }

  __device__ __forceinline__ Visible visible() const {
    return Visible(kRowsAreQueries ? p.visibility.keys_of_rows(first_row, first_column, coord.sequence)
                                   : p.visibility.queries_of_rows(first_row, first_column, coord.sequence),
                   Acc::row(0), Acc::column(0, 0));
  }

  // The visibility of the thread's elements of row r, pinned in registers.
  __device__ __forceinline__ static typename Visible::Row visible_row(const Visible& visible, int r) {
    typename Visible::Row row = visible.of_row(r);
#pragma unroll
    for (int w = 0; w < Visible::kWords; ++w) row.words[w] = ptx::pin(row.words[w]);
    return row;
  }

  // Calls function(r, j, e, visible) for each of the thread's elements.
  template <class Function>
  __device__ __forceinline__ void for_each_visibility(Function&& function) const {
    const Visible columns = visible();
#pragma unroll
    for (int r = 0; r < Acc::kThreadRows; ++r) {
      const typename Visible::Row row = visible_row(columns, r);
#pragma unroll
      for (int j = 0; j < Acc::kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) function(r, j, e, row.is_visible(j, e));
      }
    }
  }

  // Sets scores that are masked by position to -inf.
  __device__ __forceinline__ void hide_invisible(Acc& scores) const {
    for_each_visibility(
        [&](int r, int j, int e, bool visible) { scores.at(r, j, e) = visible ? scores.at(r, j, e) : -INFINITY; });
  }

  // The same where every query sees every key, and the keys of the column tiles before kFirstTile exist.
  template <int kFirstTile>
  __device__ __forceinline__ void hide_absent(Acc& scores) const {
    static_assert(kRowsAreQueries);
    const auto keys = static_cast<int>(coord.sequence.num_keys - first_column);
#pragma unroll
    for (int j = kFirstTile; j < Acc::kColumnTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const bool absent = Acc::column(j, e) >= keys;
#pragma unroll
        for (int r = 0; r < Acc::kThreadRows; ++r) scores.at(r, j, e) = absent ? -INFINITY : scores.at(r, j, e);
      }
    }
  }
};

}  // namespace flash_attn_ext
