// Leaves a tile of P or dS to a later kernel.
#pragma once

#include <type_traits>

#include "kernels/sm80/score_tile.cuh"

namespace flash_attn_ext::sm80 {

// Row 0 of the sequence's matrix, of the item's query head (attention::ScoreSpill).
template <class Element>
__device__ __forceinline__ Element* spilled_matrix(const attention::BackwardParams& p, Element* spill,
                                                   const WorkItem& item) {
  const attention::ScoreSpill& kept = p.spill;
  const bool packed = p.sequences.cu_seqlens_q != nullptr;
  const int64_t group = p.queries_per_key_head();
  const int64_t matrix =
      packed ? item.key_head - kept.first_key_head : item.key_head * p.batch + item.sequence.batch - p.first_pair;
  const int64_t head = matrix * group + item.head - item.key_head * group;
  const int64_t first_row = packed ? kept.first_row(item.sequence) : 0;
  return spill + (head * kept.rows + first_row) * kept.columns;
}

// What was written of rows [first_row, ...), all in one aligned tile of kKeptRows: the same groups of 32 columns for
// each of them, those that any of the tile's rows sees.
struct WrittenColumns {
  int begin;  // relative to first_column, as has() takes them
  int end;
  int num_rows;  // from first_row on

  __device__ __forceinline__ WrittenColumns(const attention::AttentionParams& p, const attention::Sequence& sequence,
                                            Rows rows_are, int64_t first_row, int64_t first_column) {
    const bool are_keys = rows_are == Rows::kKeys;
    const int64_t tile = first_row / kKeptRows * kKeptRows;
    const int64_t end_row = are_keys ? sequence.num_keys : sequence.num_queries;
    const attention::Band seen = are_keys ? p.visibility.queries_of_rows(tile, first_column, sequence)
                                          : p.visibility.keys_of_rows(tile, first_column, sequence);
    begin = seen.first_column(0);
    end = seen.end_column(static_cast<int>(min(end_row - tile, int64_t{kKeptRows})) - 1);
    num_rows = static_cast<int>(end_row - first_row);
  }

  __device__ __forceinline__ bool has(int column) const {
    const int group = column / 32 * 32;
    return begin < end && begin < group + 32 && group < end;
  }
};

template <class Element, class Tile>
__device__ __forceinline__ void spill_scores(const attention::BackwardParams& p, Element* spill, const Tile& where,
                                             const typename Tile::Accumulator& scores) {
  using Acc = typename Tile::Accumulator;
  if constexpr (sizeof(Element) == 2 && Acc::kColumnTiles % 4 == 0) {
    Element* first = spilled_matrix(p, spill, where.item) + where.first_row * p.spill.columns + where.first_column;
#pragma unroll
    for (int r = 0; r < Acc::kThreadRows; ++r) {
      Element* row = first + Acc::row(r) * p.spill.columns + tile::lane() % 4 * 8;
#pragma unroll
      for (int j = 0; j < Acc::kColumnTiles; j += 4) {
        uint4 packed;
        packed.x = ptx::pack(scores.at(r, j, 0), scores.at(r, j, 1), Element{});
        packed.y = ptx::pack(scores.at(r, j + 1, 0), scores.at(r, j + 1, 1), Element{});
        packed.z = ptx::pack(scores.at(r, j + 2, 0), scores.at(r, j + 2, 1), Element{});
        packed.w = ptx::pack(scores.at(r, j + 3, 0), scores.at(r, j + 3, 1), Element{});
        __stcs(reinterpret_cast<uint4*>(row + 8 * j), packed);  // read once: K and V are to stay in L2
      }
    }
  } else if constexpr (std::is_same_v<Element, float> && Tile::kRowsAre == Rows::kKeys && Acc::kColumnTiles % 4 == 0) {
    Element* first = spilled_matrix(p, spill, where.item) + where.first_row * p.spill.columns + where.first_column;
#pragma unroll
    for (int r = 0; r < Acc::kThreadRows; ++r) {
      Element* row = first + Acc::row(r) * p.spill.columns + Acc::column(0, 0);
#pragma unroll
      for (int j = 0; j < Acc::kColumnTiles; ++j) {
        __stcs(reinterpret_cast<float2*>(row + 8 * j), float2{scores.at(r, j, 0), scores.at(r, j, 1)});
      }
    }
  }
}

// The tiles from `tile` on and before `end`, which a mask leaves nothing of: zeros. where_of(tile) gives the tile.
template <class Element, class WhereOf>
__device__ __forceinline__ void spill_zeros(const attention::BackwardParams& p, int tile, int end, WhereOf&& where_of) {
  using Acc = typename std::invoke_result_t<WhereOf, int>::Accumulator;
  for (; tile < end; ++tile) {
    Acc nothing;
    nothing.clear();
    if (p.spill.p != nullptr) spill_scores<Element>(p, static_cast<Element*>(p.spill.p), where_of(tile), nothing);
    spill_scores<Element>(p, static_cast<Element*>(p.spill.ds), where_of(tile), nothing);
  }
}

}  // namespace flash_attn_ext::sm80
