// Products of rows of one tensor with rows of another, the second packed: S = Q K^T and dP = dO V^T.
//
// bfloat16 rows are multiplied as they are where the CPU has the instruction: twice the rate, and as exact, since a
// product of two of them is exact in float32. All others are multiplied in the compute type.
#pragma once

#include "kernels/cpu/products/packed_operand.h"
#include "kernels/cpu/products/tile_gemm.h"
#include "kernels/cpu/tiles.h"

namespace flash_attn_ext::cpu {

template <class Real>
class RowProduct {
 public:
  // left: a tensor of queries; right: one of keys, with as many columns.
  RowProduct(const attention::AttentionParams& params, const Operand& left, const Operand& right);

  // The packed right side.
  PackedOperand<Real>& packed() { return right_; }
  const PackedOperand<Real>& packed() const { return right_; }

  // A work item's rows of the left side.
  class Rows {
   public:
    explicit Rows(const RowProduct& product) : product_(product), scratch_(kStationaryRows * product.left_.columns) {}

    ~Rows() {
      if (product_.pairs_) release_pairs();
    }
    Rows(const Rows&) = delete;
    Rows& operator=(const Rows&) = delete;

    void load(const RowRange& rows);

    // c (rows x keys.width) = rows . (the slice of the key head's rows)^T.
    void multiply(int64_t key_head, const StreamedSlice& keys, Real* c) const;

   private:
    const RowProduct& product_;
    Scratch<Real> scratch_;
    RowRange rows_{};
    Block<const Real> loaded_{};  // where rows are multiplied in the compute type
  };

 private:
  static bool multiplies_pairs(const Operand& left, const Operand& right);

  Operand left_;
  bool pairs_;
  PackedOperand<Real> right_;  // transposed; pairs of bfloat16 count as one element of 32 bits
};

}  // namespace flash_attn_ext::cpu
