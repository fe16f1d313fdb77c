// O and the softmax states of a tile of rows. With split-KV, also the partial results of the splits, until they are
// combined.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention/division.h"
#include "attention/online_softmax.h"
#include "attention/params.h"
#include "kernels/cpu/gemm/packed_operand.h"
#include "kernels/cpu/rows/row_ops.h"
#include "kernels/cpu/schedule/tiles.h"

namespace flash_attn_ext::cpu {

// The rows of a work tile: the same queries of neighbouring heads, head after head.
struct RowTile {
  attention::Sequence sequence;
  attention::Interval heads;
  attention::Interval queries;

  int64_t num_queries() const { return queries.end - queries.begin; }
  int64_t count() const { return (heads.end - heads.begin) * num_queries(); }
  int64_t head(int64_t row) const { return heads.begin + row / num_queries(); }
  int64_t query(int64_t row) const { return queries.begin + row % num_queries(); }
};

// Unnormalised O, m and l of up to kStationaryRows rows.
template <class Real>
class OutputTile {
 public:
  explicit OutputTile(int64_t columns)
      : columns_(columns), out_(kStationaryRows * columns), softmax_(kStationaryRows) {}

  // Starts a tile whose rows have seen no key.
  void clear(int64_t rows) {
    std::fill_n(softmax_.begin(), rows, attention::SoftmaxState<Real>{});
    rows_ = rows;
    is_empty_ = true;
  }

  // Whether no key has reached O yet. Its memory then has no meaning, so the first term is stored instead of added.
  bool is_empty() const { return is_empty_; }
  void set_written() { is_empty_ = false; }
  void fill_if_empty() {
    if (is_empty_) std::fill_n(out_.data(), rows_ * columns_, Real(0));
    is_empty_ = false;
  }

  Block<Real> out() { return {out_.data(), columns_}; }
  attention::SoftmaxState<Real>& softmax(int64_t row) { return softmax_[row]; }

 private:
  int64_t columns_;
  int64_t rows_ = 0;
  bool is_empty_ = true;
  Scratch<Real> out_;
  std::vector<attention::SoftmaxState<Real>> softmax_;
};

// The partial results of split-KV for the rows of a group of key heads. Split n has keys [n * keys_per_split, ...) of
// every sequence, so that the result of a row depends only on its own keys. There is one tile of queries.
template <class Real>
class KvSplits {
 public:
  // keys_per_split 0: no split-KV.
  KvSplits(const attention::AttentionParams& params, int64_t keys_per_split)
      : p_(params),
        keys_per_split_(keys_per_split),
        count_(keys_per_split == 0 ? 0 : attention::ceil_div(params.sequences.max_seqlen_k, keys_per_split)) {}

  bool enabled() const { return count_ > 0; }
  int64_t count() const { return count_; }
  attention::Interval keys(int64_t split) const { return {split * keys_per_split_, (split + 1) * keys_per_split_}; }

  int64_t bytes_per_key_head() const { return rows_per_key_head() * row_elements() * int64_t{sizeof(Real)}; }

  // Allocates memory for the splits of these key heads.
  void start(const HeadRange& key_heads) {
    first_head_ = key_heads.begin * p_.queries_per_key_head();
    rows_.reserve((key_heads.end - key_heads.begin) * rows_per_key_head() * row_elements());
  }

  void store(const RowTile& rows, int64_t split, OutputTile<Real>& tile) {
    tile.fill_if_empty();
    for (int64_t i = 0; i < rows.count(); ++i) {
      Real* stored = row(rows, i, split);
      const attention::SoftmaxState<Real>& softmax = tile.softmax(i);
      stored[0] = softmax.m;
      stored[1] = softmax.l;
      std::copy_n(tile.out().row(i), p_.head_dim_v, stored + 2);
    }
  }

  // Combines the splits of these rows in ascending order of their keys.
  void combine(const RowTile& rows, OutputTile<Real>& tile) const {
    tile.clear(rows.count());
    tile.fill_if_empty();
    const int64_t splits = attention::ceil_div(rows.sequence.num_keys, keys_per_split_);
    for (int64_t i = 0; i < rows.count(); ++i) {
      attention::SoftmaxState<Real>& softmax = tile.softmax(i);
      Real* out = tile.out().row(i);
      for (int64_t split = 0; split < splits; ++split) {
        const Real* stored = row(rows, i, split);
        const attention::SoftmaxState<Real> other = {stored[0], stored[1]};
        multiply_row(out, p_.head_dim_v, softmax.merge(other));
        const Real weight = std::exp(other.m - softmax.shift());
        // A split without weight must not reach the result, even if it is NaN.
        if (weight != Real(0)) add_weighted_row(out, stored + 2, p_.head_dim_v, weight);
      }
    }
  }

 private:
  int64_t row_elements() const { return p_.head_dim_v + 2; }  // m, l, O
  int64_t rows_per_key_head() const { return p_.queries_per_key_head() * p_.sequences.max_seqlen_q * count_; }
  int64_t offset(const RowTile& rows, int64_t row, int64_t split) const {
    const int64_t head_index = rows.sequence.batch * p_.num_heads_q + rows.head(row) - first_head_;
    return ((head_index * p_.sequences.max_seqlen_q + rows.query(row)) * count_ + split) * row_elements();
  }
  Real* row(const RowTile& rows, int64_t row, int64_t split) { return rows_.data() + offset(rows, row, split); }
  const Real* row(const RowTile& rows, int64_t row, int64_t split) const {
    return rows_.data() + offset(rows, row, split);
  }

  const attention::AttentionParams& p_;
  int64_t keys_per_split_;
  int64_t count_;           // of the longest sequence
  int64_t first_head_ = 0;  // of the group that is processed
  Scratch<Real> rows_;
};

}  // namespace flash_attn_ext::cpu
