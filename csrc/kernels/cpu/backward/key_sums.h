// Accumulates dK = dS^T Q or dV = P^T dO of one work tile's keys: sums of weights^T . rows over its tiles of queries.
// The weights are transposed instead of the rows, which already have the layout that the GEMM wants. The weights are in
// L1 or L2, and with few keys a tile of them has no more elements than the rows.
#pragma once

#include "kernels/cpu/gemm/operand.h"
#include "kernels/cpu/gemm/tile_gemm.h"
#include "kernels/cpu/schedule/tiles.h"
#include "kernels/cpu/schedule/work_queue.h"

namespace flash_attn_ext::cpu {

template <class Real>
class KeySums {
 public:
  // target: dK or dV, absent if it is not requested; rows: Q or dO.
  KeySums(const Operand& target, const Operand& rows)
      : target_(target),
        rows_(rows),
        sums_(wanted() ? kStreamedRows * rows.columns : 0),
        converted_(wanted() ? kStationaryRows * rows.columns : 0),
        transposed_(wanted() ? kStreamedRows * kStationaryRows : 0) {}

  bool wanted() const { return target_.view.data != nullptr; }

  // Sets the sums of this many keys to zero.
  void start(int64_t num_keys) {
    if (wanted()) std::fill_n(sums_.data(), num_keys * rows_.columns, Real(0));
  }

  // Adds the contribution of these queries to keys [first, first + num_keys) of the work tile. Query i has row i of the
  // weights.
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
