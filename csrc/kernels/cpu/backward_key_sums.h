// dK or dV of one item's keys: sums over its tiles of queries of weights^T . rows, dK of dS^T . Q and dV of P^T . dO.
// The weights are transposed and not the rows, which lie as the product wants them: they are in L1 or L2, and a tile of
// them has no more elements than the rows where there are few keys.
#pragma once

#include "kernels/cpu/products/few_rows.h"
#include "kernels/cpu/products/operand.h"
#include "kernels/cpu/products/transpose.h"
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/tiles.h"

namespace flash_attn_ext::cpu {

template <class Real>
class KeySums {
 public:
  // target: dK or dV, absent where it is not wanted; rows: Q or dO.
  KeySums(const Operand& target, const Operand& rows)
      : target_(target),
        rows_(rows),
        sums_(wanted() ? kStreamedRows * rows.columns : 0),
        converted_(wanted() ? kStationaryRows * rows.columns : 0),
        transposed_(wanted() ? kStreamedRows * kStationaryRows : 0) {}

  bool wanted() const { return target_.view.data != nullptr; }

  // Zeros for so many keys.
  void start(int64_t num_keys) {
    if (wanted()) std::fill_n(sums_.data(), num_keys * rows_.columns, Real(0));
  }

  // Adds what these queries give to keys [first, first + num_keys) of the item. Row i of the weights is query i.
  void add(const RowRange& queries, int64_t first, int64_t num_keys, Block<const Real> weights) {
    if (!wanted()) return;
    const Block<const Real> rows = load_rows<Real>(rows_, queries, converted_.data());
    const Block<Real> sums = {sums_.data() + first * rows_.columns, rows_.columns};
    const GemmShape shape = {num_keys, rows_.columns, queries.count};
    const bool finite = all_finite<Real>(rows, queries.count, rows_.columns);
    if (finite && num_keys <= kFewKeys) return multiply_few_columns(shape, weights, rows, sums, Accumulate::kYes);
    const Block<const Real> left = {transposed_.data(), kStationaryRows};
    transpose(queries.count, num_keys, weights, {transposed_.data(), left.stride});
    if (finite) {
      multiply(shape, left, rows, sums, Accumulate::kYes);
    } else {
      multiply_nonzero(shape, left, rows, sums);
    }
  }

  // The keys' rows of the target = scale * sums.
  void store(const RowRange& keys, double scale) const {
    if (wanted()) store_rows<Real>(target_, keys, {sums_.data(), rows_.columns}, static_cast<Real>(scale));
  }

 private:
  Operand target_, rows_;
  Scratch<Real> sums_, converted_, transposed_;
};

}  // namespace flash_attn_ext::cpu
