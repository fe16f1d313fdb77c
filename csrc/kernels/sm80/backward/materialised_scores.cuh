// Materialises a tile of P or dS for a later kernel (MaterialisedScores).
#pragma once

#include "kernels/config/sm80_backward.h"
#include "kernels/schedule/head_tiles.h"
#include "kernels/schedule/schedule.cuh"
#include "kernels/sm80/sm80_kernels.h"
#include "ptx/pin.h"
#include "tile/accumulator.h"

namespace flash_attn_ext::sm80 {

// The offset, in elements, of row 0 of the sequence's matrix of a query head (MaterialisedScores).
__device__ __forceinline__ int64_t materialised_matrix(const BackwardParams& p, const HeadCoord& coord) {
  const MaterialisedScores& materialised = p.materialised;
  const bool packed = p.sequences.cu_seqlens_q != nullptr;
  const int64_t group = p.queries_per_key_head();
  const int64_t matrix = packed ? coord.key_head - materialised.first_key_head
                                : coord.key_head * p.batch + coord.sequence.batch - p.first_pair;
  const int64_t head = matrix * group + coord.head - coord.key_head * group;
  const int64_t first_row = packed ? materialised.first_row(coord.sequence) : 0;
  return (head * materialised.rows + first_row) * materialised.columns;
}

// The columns that were written in rows [first_row, ...), all of which are in one aligned tile of kMaterialisedRows
// rows. All rows of such a tile have the same groups of 32 columns: those that any of its rows sees.
struct WrittenColumns {
  int begin;  // relative to first_column, as is the argument of has()
  int end;
  int num_rows;  // from first_row on

  __device__ __forceinline__ WrittenColumns(const attention::AttentionParams& p, const attention::Sequence& sequence,
                                            Rows rows_are, int64_t first_row, int64_t first_column) {
    const bool are_keys = rows_are == Rows::kKeys;
    const int64_t tile = first_row / kMaterialisedRows * kMaterialisedRows;
    const int64_t end_row = are_keys ? sequence.num_keys : sequence.num_queries;
    const attention::Band seen = are_keys ? p.visibility.queries_of_rows(tile, first_column, sequence)
                                          : p.visibility.keys_of_rows(tile, first_column, sequence);
    begin = seen.first_column(0);
    end = seen.end_column(static_cast<int>(min(end_row - tile, int64_t{kMaterialisedRows})) - 1);
    num_rows = static_cast<int>(end_row - first_row);
  }

  __device__ __forceinline__ bool has(int column) const {
    const int group = column / 32 * 32;
    return begin < end && begin < group + 32 && group < end;
  }
};

// Where a thread writes its elements of a warp's rows of P or dS. It is computed once, because it takes a division and
// as many instructions as writing a tile.
template <class Element, class Acc>
class MaterialisedRows {
 public:
  MaterialisedRows() = default;  // has no rows
  __device__ __forceinline__ MaterialisedRows(const BackwardParams& p, const HeadCoord& coord, int64_t first_row) {
    const int column = sizeof(Element) == 2 ? tile::lane() % 4 * 8 : Acc::column(0, 0);
    const int64_t row = first_row + Acc::row(0);
    own_ = ptx::pin(static_cast<int>(materialised_matrix(p, coord) + row * p.materialised.columns + column));
  }

  // Writes the columns from first_column on. matrices: p or ds of p.materialised. The stores are marked evict-first in
  // L2 (st.cs), because each element is read once, and K and V should stay.
  __device__ __forceinline__ void write(const BackwardParams& p, void* matrices, int first_column,
                                        const Acc& scores) const {
    if constexpr (Acc::kColumnTiles % 4 == 0) {
      const auto columns = static_cast<int>(p.materialised.columns);
#pragma unroll
      for (int r = 0; r < Acc::kThreadRows; ++r) {
        Element* row = static_cast<Element*>(matrices) + (own_ + first_column + Acc::row_step(r) * columns);
#pragma unroll
        for (int j = 0; j < Acc::kColumnTiles; j += 4) write_group(row + 8 * j, scores, r, j);
      }
    }
  }

  // Writes zeros to tiles [tile, end) of all matrices, which a mask hides completely.
  __device__ __forceinline__ void write_zeros(const BackwardParams& p, int tile, int end) const {
    for (; tile < end; ++tile) {
      Acc nothing;
      nothing.clear();
      if (p.materialised.p != nullptr) write(p, p.materialised.p, tile * 8 * Acc::kColumnTiles, nothing);
      write(p, p.materialised.ds, tile * 8 * Acc::kColumnTiles, nothing);
    }
  }

 private:
  __device__ __forceinline__ static void write_group(Element* row, const Acc& scores, int r, int first_j) {
    if constexpr (sizeof(Element) == 2) {
      uint32_t packed[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        packed[j] = ptx::pack(scores.at(r, first_j + j, 0), scores.at(r, first_j + j, 1), Element{});
      }
      __stcs(reinterpret_cast<uint4*>(row), uint4{packed[0], packed[1], packed[2], packed[3]});
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        __stcs(reinterpret_cast<float2*>(row + 8 * j),
               float2{scores.at(r, first_j + j, 0), scores.at(r, first_j + j, 1)});
      }
    }
  }

  int own_ = 0;  // the thread's first element of column 0; 32 bits suffice (MaterialisedScores::kMostBytes)
};

}  // namespace flash_attn_ext::sm80
