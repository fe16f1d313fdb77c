// Writes rows of an accumulator straight from registers, 16 bytes at a time, where their memory allows it.
#pragma once

#include "kernels/epilogue/store_quads.cuh"

namespace flash_attn_ext {

// store_row_quads for targets that are known to be in chunks: it takes a tenth of the code. row_of: where a thread's
// row r goes.
template <class Element, class Acc, class RowOf>
__device__ __forceinline__ bool store_row_chunks(const OutputRows<Element>& target, const Acc& acc, RowOf&& row_of) {
  static_assert(sizeof(Element) == 2 && Acc::kColumnTiles % 4 == 0);
  const int own = tile::lane() % 4;  // which of four column tiles the thread will have
  bool any = false;
#pragma unroll
  for (int r = 0; r < Acc::kThreadRows; ++r) {
    const int to = row_of(r);
    const bool exists = to < target.rows;
    float zero = 0.0f;
    Element* row = target.data + to * target.row_stride + 8 * own;
#pragma unroll
    for (int j = 0; j < Acc::kColumnTiles; j += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        zero = fmaf(acc.at(r, j + i, 0), 0.0f, fmaf(acc.at(r, j + i, 1), 0.0f, zero));
        words[i] = ptx::pack(acc.at(r, j + i, 0), acc.at(r, j + i, 1), Element{});
      }
      transpose_quad(words);
      if (exists && 8 * (j + own) < target.columns) {
        *reinterpret_cast<uint4*>(row + 8 * j) = uint4{words[0], words[1], words[2], words[3]};
      }
    }
    any |= exists && zero != 0.0f;
  }
  return any;
}

template <class Element, class Acc>
__device__ __forceinline__ bool store_row_chunks(const OutputRows<Element>& target, const Acc& acc) {
  return store_row_chunks(target, acc, [](int r) { return Acc::row(r); });
}

}  // namespace flash_attn_ext
