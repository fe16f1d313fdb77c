// Writes an accumulator directly from registers, 16 bytes at a time.
#pragma once

#include "kernels/epilogue/store_rows.cuh"

namespace flash_attn_ext {

// Transposes 4 x 4 words among the four threads of a quad: afterwards thread t has word t of each thread, in thread
// order.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4]) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool upper = (tile::lane() & step) != 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int low = step == 1 ? 2 * i : i;  // the words that thread lane ^ step keeps and that this one keeps
      const int high = low + step;
      const uint32_t received = __shfl_xor_sync(0xFFFFFFFFu, upper ? words[low] : words[high], step);
      (upper ? words[low] : words[high]) = received;
    }
  }
}

// Takes 16-bit elements, and targets that are known to be in chunks. Rows of 16 columns are written as whole sectors of
// 32 bytes.
template <class Element, class Acc>
__device__ __forceinline__ void store_whole_quads(const OutputRows<Element>& target, const Acc& acc) {
  static_assert(sizeof(Element) == 2 && Acc::kColumnTiles % 2 == 0);
  const int own = tile::lane() % 4;  // the word that the thread will have
#pragma unroll
  for (int i = 0; i < Acc::kRowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < Acc::kColumnTiles; j += 2) {
      uint32_t words[4];
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const int r = 2 * i + word / 2;
        words[word] = ptx::pack(acc.at(r, j + word % 2, 0), acc.at(r, j + word % 2, 1), Element{});
      }
      transpose_quad(words);
      const int row = 16 * i + 8 * (own / 2) + tile::lane() / 4;
      const int column = 8 * (j + own % 2);
      if (row >= target.rows || column >= target.columns) continue;
      *reinterpret_cast<uint4*>(target.data + row * target.row_stride + column) =
          uint4{words[0], words[1], words[2], words[3]};
    }
  }
}

// Takes any target.
template <class Element, class Acc>
__device__ __forceinline__ void store_quads(const OutputRows<Element>& target, const Acc& acc) {
  if (target.in_chunks()) {
    store_whole_quads(target, acc);
  } else {
    store_elements(target, acc);
  }
}

// Writes one row at a time, 32 of its columns as 64 contiguous bytes. row_of: the target row of a thread's row r.
// Returns whether one of the thread's elements in an existing row is not finite. Where rows are not whole 16-byte
// chunks, it stores nothing, and only reports this.
template <class Element, class Acc, class RowOf>
__device__ __forceinline__ bool store_row_chunks(const OutputRows<Element>& target, const Acc& acc, RowOf&& row_of,
                                                 bool in_chunks = true) {
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
      if (in_chunks && exists && 8 * (j + own) < target.columns) {
        *reinterpret_cast<uint4*>(row + 8 * j) = uint4{words[0], words[1], words[2], words[3]};
      }
    }
    any |= exists && zero != 0.0f;
  }
  return any;
}

// Takes targets that are known to be in chunks, with much less code.
template <class Element, class Acc>
__device__ __forceinline__ bool store_row_chunks(const OutputRows<Element>& target, const Acc& acc) {
  return store_row_chunks(target, acc, [](int r) { return Acc::row(r); });
}

// Takes any target.
template <class Element, class Acc>
__device__ __forceinline__ bool store_row_quads(const OutputRows<Element>& target, const Acc& acc) {
  const bool in_chunks = target.in_chunks();
  const bool any = store_row_chunks(
      target, acc, [](int r) { return Acc::row(r); }, in_chunks);
  if (!in_chunks) store_elements(target, acc);
  return any;
}

}  // namespace flash_attn_ext
