// Materialised scores: how large their matrices are, and where each score lies.
#pragma once

#include <cstdint>

#include "attention/division.h"
#include "attention/sequence.h"

namespace flash_attn_ext {

// Matrices of scores (P or dS, in the element type) that one kernel of a backward pass stores for another. There is one
// for each query head of the pairs of a launch. Rows are what the writer keeps stationary, and columns what streams
// past it. Both are padded to multiples of kPadding. In a packed batch a head's matrix has the rows of all sequences,
// one after the other. Only visible scores are written.
//
// In each group of 32 columns, 16-bit elements are in the order in which a thread of an accumulator holds them, so that
// it writes 16 bytes at a time: column 8 j + 2 t + e (j, t < 4, e < 2) is at position 8 t + 2 j + e. 32-bit elements
// are in order, and the pairs of four threads make 32 bytes.
struct MaterialisedScores {
  static constexpr int64_t kPadding = 128;
  static constexpr int64_t kMostBytes = int64_t{2} << 30;  // of all matrices, whose elements are counted in 32 bits

  void* p = nullptr;   // P as the GEMM with dO reads it; null where only dS is materialised
  void* ds = nullptr;  // d loss / d (scale * q.k); null: nothing is materialised
  bool rows_are_keys = false;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t first_key_head = 0;  // of the launch; in a packed batch it has all of a head's pairs

  FLASH_HOST_DEVICE bool present() const { return ds != nullptr; }
  FLASH_HOST_DEVICE static int64_t padded(int64_t length) { return attention::ceil_div(length, kPadding) * kPadding; }

  // Where the rows of a packed sequence begin: far enough from those of the previous one, wherever that ends.
  FLASH_HOST_DEVICE int64_t first_row(const attention::Sequence& sequence) const {
    const int64_t begin = rows_are_keys ? sequence.key_begin : sequence.query_begin;
    return (begin / kPadding + sequence.batch) * kPadding;
  }
  static int64_t packed_rows(int64_t total, int64_t batch) { return padded(total) + batch * kPadding; }

  template <class Element>
  FLASH_HOST_DEVICE static int place(int column) {
    if (sizeof(Element) != 2) return column;
    return column / 32 * 32 + column % 8 / 2 * 8 + column % 32 / 8 * 2 + column % 2;
  }
};

}  // namespace flash_attn_ext
