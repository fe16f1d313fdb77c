// GEMMs of the rows of one tensor with those of another: S = Q K^T and dP = dO V^T. A call uses one of three ways, the
// same for both passes, so that both compute the same S:
// - With few rows in all, or few keys, the second tensor is read row by row in place. Packing it would take longer than
//   the GEMM, or leave most of the microkernel's block empty.
// - With bfloat16, if the CPU has the instruction, both are multiplied as they are, the second packed. This is faster
//   (docs/kernels/cpu.md, "Decisions") and as exact, because a product of two bfloat16 numbers is exact in float32.
// - Otherwise both are multiplied in the compute type, the second packed.
#pragma once

#include "kernels/cpu/gemm/packed_operand.h"
#include "kernels/cpu/gemm/tile_gemm.h"
#include "kernels/cpu/schedule/tiles.h"

namespace flash_attn_ext::cpu {

// Whether the query heads of a key head have so few rows that one tile has them all. With more rows, packing pays for
// itself, because they share the packed keys.
bool has_few_rows(const attention::AttentionParams& params);

// Whether there are so few keys that dot products are faster than the microkernel.
bool has_few_keys(const attention::AttentionParams& params);

template <class Real>
class RowGemm {
 public:
  // left: a tensor of queries; right: one of keys, with as many columns.
  RowGemm(const attention::AttentionParams& params, const Operand& left, const Operand& right);

  // Bytes that a key head's packed rows take.
  int64_t bytes_per_key_head() const { return in_place_ ? 0 : right_.bytes_per_key_head(); }

  // Packs the rows of these key heads.
  void load(const HeadRange& key_heads) {
    if (!in_place_) right_.load(key_heads);
  }

  // Whether the second tensor is read in place.
  bool in_place() const { return in_place_; }

  // The step in which slices of keys are clipped. With few keys it is 1, so a score tile has no gaps between its rows.
  int64_t clip() const { return has_few_keys(p_) ? 1 : kClipRows; }

  // A work tile's rows of the left side.
  class Rows {
   public:
    explicit Rows(const RowGemm& gemm)
        : gemm_(gemm),
          scratch_(kStationaryRows * gemm.left_.columns),
          keys_(gemm.in_place_ ? kStreamedRows * gemm.left_.columns : 0) {}

    ~Rows() {
      if (gemm_.pairs_) release_pairs();
    }
    Rows(const Rows&) = delete;
    Rows& operator=(const Rows&) = delete;

    // Loads the rows of one head or, if rows are few, of several neighbouring heads.
    void load(const attention::Sequence& sequence, const attention::Interval& heads,
              const attention::Interval& queries);

    // c (rows x keys.width) = rows . (the slice of the key head's rows)^T. The columns from keys.count on have no
    // meaning.
    void multiply(int64_t key_head, const StreamedSlice& keys, Real* c);

   private:
    const RowGemm& gemm_;
    Scratch<Real> scratch_;
    Scratch<Real> keys_;
    attention::Sequence sequence_{};
    RowRange rows_{};             // of all heads together
    Block<const Real> loaded_{};  // if rows are multiplied in the compute type
  };

 private:
  static bool multiplies_pairs(const Operand& left, const Operand& right);

  const attention::AttentionParams& p_;
  Operand left_;
  Operand unpacked_right_;
  bool in_place_;
  bool pairs_;
  PackedOperand<Real> right_;  // transposed; pairs of bfloat16 count as one element of 32 bits
};

}  // namespace flash_attn_ext::cpu
