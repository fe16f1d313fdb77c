// Forward pass: O = softmax(score(Q K^T)) V and its LSE (Dao 2023, "FlashAttention-2", algorithm 1).
//
// Work tile: one tile of kStationaryRows queries of one head or, if queries are few, of all query heads of a key head.
// It streams over the key tiles that it sees:
//   S = Q K^T (K packed transposed) -> scores -> P = exp(S - m), row by row -> O = O * factor + P V.
// There is an m and an l for each row; O is scaled by 1 / l at the end. With split-KV, a work tile is one split of the
// keys. Its O, m and l stay in memory until all splits are combined in the order of their keys (forward_splits.h).
#include <algorithm>
#include <limits>
#include <memory>

#include "attention/division.h"
#include "attention/online_softmax.h"
#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cpu/forward/forward_splits.h"
#include "kernels/cpu/gemm/packed_operand.h"
#include "kernels/cpu/gemm/row_gemm.h"
#include "kernels/cpu/rows/row_ops.h"
#include "kernels/cpu/rows/score_row.h"
#include "kernels/cpu/schedule/selected_keys.h"
#include "kernels/cpu/schedule/tiles.h"
#include "kernels/cpu/schedule/work_queue.h"

namespace flash_attn_ext::cpu {
namespace {

using attention::Coordinate;
using attention::ForwardParams;
using attention::Interval;
using attention::Sequence;
using attention::TileCoverage;

template <class Real>
struct ForwardOperands {
  bool few_rows;  // a work tile has the rows of all query heads of a key head
  bool one_tile;  // all keys fit one tile: each thread packs the operands of its head
  RowGemm<Real> qk;
  PackedOperand<Real> v;

  explicit ForwardOperands(const ForwardParams& p)
      : few_rows(has_few_rows(p)),
        one_tile(one_tile_of_keys(p)),
        qk(p, {p.q, p.element, p.head_dim_qk}, {p.k, p.element, p.head_dim_qk}),
        v(p, {p.v, p.element, p.head_dim_v}, Form::kRows) {}

  // Bytes of the operands that are packed for all threads.
  int64_t bytes_per_key_head() const {
    return in_place() || one_tile ? 0 : qk.bytes_per_key_head() + v.bytes_per_key_head();
  }

  // Whether a work tile reads K and V in place; otherwise both are packed first.
  bool in_place() const { return qk.in_place(); }

  void load(const HeadRange& key_heads) {
    if (in_place()) return;
    qk.load(key_heads);
    v.load(key_heads);
  }
};

template <class Real>
class ForwardWorker {
 public:
  ForwardWorker(const ForwardParams& params, const ForwardOperands<Real>& shared)
      : p_(params),
        own_(shared.one_tile && !shared.in_place() ? std::make_unique<ForwardOperands<Real>>(params) : nullptr),
        operands_(own_ ? *own_ : shared),
        transform_(params.score_mod.transform<Real, VectorMath>()),
        q_(operands_.qk),
        selected_keys_(params),
        scores_(kStationaryRows * kStreamedRows),
        values_(operands_.in_place() ? kStreamedRows * params.head_dim_v : 0),
        added_(kStreamedRows),
        keep_(kStreamedRows),
        maxima_(kStationaryRows),
        shifts_(kStationaryRows),
        sums_(kStationaryRows),
        factors_(kStationaryRows),
        tile_(params.head_dim_v) {}

  // Computes O and LSE of the rows.
  void run(const RowTile& rows) {
    attend(rows, {0, rows.sequence.num_keys});
    finish();
  }
  // Computes and stores the partial O, m and l of one split of the keys.
  void run_split(const RowTile& rows, KvSplits<Real>& splits, int64_t split) {
    attend(rows, splits.keys(split));
    splits.store(rows, split, tile_);
  }
  // Combines all splits into O and LSE.
  void combine(const RowTile& rows, const KvSplits<Real>& splits) {
    rows_ = rows;
    splits.combine(rows, tile_);
    finish();
  }

 private:
  int64_t key_head() const { return rows_.heads.begin / p_.queries_per_key_head(); }
  Block<Real> out() { return tile_.out(); }

  void attend(const RowTile& rows, const Interval& keys) {
    rows_ = rows;
    tile_.clear(rows.count());
    load_own_operands();
    const Interval seen = p_.visibility.keys_of_tile(rows.queries, rows.sequence);
    const Interval visible = {std::max(seen.begin, keys.begin), std::min(seen.end, keys.end)};
    if (visible.empty()) return;
    q_.load(rows.sequence, rows.heads, rows.queries);
    selected_keys_.start(rows.sequence, rows.heads, rows.queries);
    for_each_slice(visible, rows.sequence.num_keys, operands_.qk.clip(),
                   [&](const StreamedSlice& slice) { step(slice); });
  }

  void load_own_operands() {
    const int64_t index = rows_.sequence.batch * p_.num_heads_k + key_head();
    if (own_ && index != loaded_) own_->load({index, index + 1});
    loaded_ = index;
  }

  void step(const StreamedSlice& keys) {
    const TileCoverage seen = selected_keys_.coverage({keys.first, keys.first + keys.count});
    if (seen == TileCoverage::kNone) return;
    score_mod_ = &selected_keys_.score_mod(seen);
    const ScoreRows<Real> scores = {scores_.data(), keys.width, rows_.count(), keys.count};
    q_.multiply(key_head(), keys, scores.data);
    softmax(keys, scores);

    const Values v = values(keys);
    const GemmShape shape = {rows_.count(), p_.head_dim_v, keys.count};
    const Block<const Real> probabilities = {scores.data, scores.stride};
    if (v.finite) {
      multiply(shape, probabilities, v.rows, out(), tile_.is_empty() ? Accumulate::kNo : Accumulate::kYes);
    } else {
      tile_.fill_if_empty();
      multiply_nonzero(shape, probabilities, v.rows, out());
    }
    tile_.set_written();
  }

  // Turns the products into unnormalised probabilities, which are 0 for keys that a row does not see.
  void softmax(const StreamedSlice& keys, const ScoreRows<Real>& scores) {
    const Interval range = {keys.first, keys.first + keys.count};
    const bool full = p_.visibility.coverage(rows_.queries, range, rows_.sequence) == TileCoverage::kFull;
    if (full && score_mod_->plain()) {
      scale_rows(scores, transform_.scale, maxima_.data());
    } else {
      for_each_row(keys, full, [&](int64_t i, const ScoreRun& run, int64_t offset) {
        Real* row = scores.data + i * scores.stride;
        maxima_.data()[i] = row_maximum(run, row + offset);
        std::fill(row, row + offset, -kInfinity);
        std::fill(row + offset + run.count, row + scores.padded(), -kInfinity);
      });
    }
    for (int64_t i = 0; i < scores.rows; ++i) {
      attention::SoftmaxState<Real>& state = tile_.softmax(i);
      const Real factor = state.raise_maximum(maxima_.data()[i]);
      if (!tile_.is_empty() && factor != Real(1)) multiply_row(out().row(i), p_.head_dim_v, factor);
      shifts_.data()[i] = state.shift();
    }
    exponentiate_rows(scores, shifts_.data(), sums_.data());
    for (int64_t i = 0; i < scores.rows; ++i) tile_.softmax(i).l += sums_.data()[i];
    if (!p_.dropout.enabled()) return;
    for_each_row(keys, full, [&](int64_t i, const ScoreRun& run, int64_t offset) {
      load_keep(p_.dropout, run, keep_.data());
      multiply_rows(scores.data + i * scores.stride + offset, keep_.data(), run.count);
    });
  }

  // Calls function(row, run, offset) for each row. `run` has the keys of the slice that the row sees, and `offset` is
  // the position of the first of them in the slice.
  template <class Function>
  void for_each_row(const StreamedSlice& keys, bool full, Function&& function) {
    for (int64_t i = 0; i < rows_.count(); ++i) {
      const int64_t query = rows_.query(i);
      const Interval seen = full ? Interval{0, keys.count} : within(p_.visibility.keys_of(query, rows_.sequence), keys);
      function(i,
               ScoreRun{{rows_.sequence.batch, rows_.head(i), query, keys.first + seen.begin}, seen.end - seen.begin},
               seen.begin);
    }
  }

  struct Values {
    Block<const Real> rows;
    bool finite;
  };
  Values values(const StreamedSlice& keys) {
    const Sequence& sequence = rows_.sequence;
    if (!operands_.in_place()) {
      Block<const Real> rows = operands_.v.tile(sequence.batch, key_head(), keys.tile);
      rows.data += keys.offset_in_tile() * rows.stride;
      return {rows, operands_.v.finite(sequence.batch, key_head(), keys.tile)};
    }
    const Positions positions = {sequence, key_head(), {keys.first, keys.first + keys.count}};
    const Block<const Real> rows =
        load_positions<Real>(p_, {p_.v, p_.element, p_.head_dim_v}, positions, values_.data());
    return {rows, all_finite<Real>(rows, keys.count, p_.head_dim_v)};
  }

  Real row_maximum(const ScoreRun& run, Real* scores) {
    if (score_mod_->plain()) {
      Real maximum;
      scale_rows(ScoreRows<Real>{scores, run.count, 1, run.count}, transform_.scale, &maximum);
      return maximum;
    }
    const Real* added =
        load_added(*score_mod_, run, rows_.sequence, p_.visibility.diagonal(rows_.sequence), added_.data());
    return transform_row(scores, added, run.count, transform_);
  }

  void finish() {
    const Sequence& sequence = rows_.sequence;
    tile_.fill_if_empty();
    for (int64_t i = 0; i < rows_.count(); ++i) {
      attention::SoftmaxState<Real>& softmax = tile_.softmax(i);
      const int64_t head = rows_.head(i);
      const Real largest = softmax.m;
      Real factor = Real(1);
      if (p_.sink != nullptr) factor = softmax.add_sink(static_cast<const Real*>(p_.sink)[head]);
      factors_.data()[i] = factor * softmax.output_factor();
      const attention::LogSumExp<Real> lse = softmax.log_sum_exp();
      const int64_t row = sequence.query_begin + rows_.query(i);
      *p_.lse.at<Real>(sequence.batch, head, row) = lse.value;
      if (p_.lse_residual.present()) *p_.lse_residual.at<Real>(sequence.batch, head, row) = lse.residual;
      if (p_.row_max.present()) {
        *p_.row_max.at<Real>(sequence.batch, head, row) = softmax.l != softmax.l ? softmax.l : largest;
      }
    }
    const Operand target = {p_.out, p_.element, p_.head_dim_v};
    for (int64_t head = rows_.heads.begin; head < rows_.heads.end; ++head) {
      const RowRange range = {sequence.batch, head, sequence.query_begin + rows_.queries.begin, rows_.num_queries()};
      const int64_t first = (head - rows_.heads.begin) * rows_.num_queries();
      store_rows<Real>(target, range, {out().row(first), p_.head_dim_v}, factors_.data() + first);
    }
  }

  static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

  const ForwardParams& p_;
  const std::unique_ptr<ForwardOperands<Real>> own_;  // of the current head if threads pack for themselves, else null
  int64_t loaded_ = -1;                               // the head whose operands own_ holds
  const ForwardOperands<Real>& operands_;
  const Transform<Real> transform_;
  typename RowGemm<Real>::Rows q_;
  SelectedKeys selected_keys_;
  const attention::ScoreMod* score_mod_ = nullptr;  // of the slice of keys
  Scratch<Real> scores_, values_, added_, keep_;
  Scratch<Real> maxima_, shifts_, sums_, factors_;  // one value for each row
  OutputTile<Real> tile_;
  RowTile rows_{};
};

template <class Real>
void forward_as(const ForwardParams& p, int64_t keys_per_split) {
  ForwardOperands<Real> operands(p);
  KvSplits<Real> splits(p, keys_per_split);
  const int64_t tiles = attention::ceil_div(p.sequences.max_seqlen_q, kStationaryRows);
  const int64_t heads_per_work_tile = operands.few_rows ? p.queries_per_key_head() : 1;
  for (const HeadRange& key_heads : head_groups(p, operands.bytes_per_key_head() + splits.bytes_per_key_head())) {
    if (!operands.one_tile) operands.load(key_heads);
    splits.start(key_heads);
    const int64_t first_head = key_heads.begin * p.queries_per_key_head();
    const int64_t head_work_tiles = (key_heads.end - key_heads.begin) * p.queries_per_key_head() / heads_per_work_tile;
    // Calls function(worker, rows, repetition) for every tile of rows, `repetitions` times.
    const auto for_each_tile = [&](int64_t repetitions, const auto& function) {
      const int64_t work_tiles = head_work_tiles * tiles * repetitions;
      run_work_tiles(work_tiles, operands.one_tile ? grain_of_neighbours(work_tiles) : 1, [&] {
        return [&, worker = ForwardWorker<Real>(p, operands)](int64_t work_tile) mutable {
          // With one tile of keys, the query tiles of a head are neighbours, because they share its keys. Otherwise the
          // last queries go first, because they see most keys.
          const int64_t head_work_tile =
              operands.one_tile ? work_tile / tiles % head_work_tiles : work_tile % head_work_tiles;
          const int64_t tile = operands.one_tile ? work_tile % tiles : tiles - 1 - work_tile / head_work_tiles % tiles;
          const int64_t head_index = first_head + head_work_tile * heads_per_work_tile;
          const int64_t head = head_index % p.num_heads_q;
          const Sequence sequence = p.sequence_of(head_index / p.num_heads_q);
          const int64_t begin = tile * kStationaryRows;
          const int64_t end = std::min(begin + kStationaryRows, sequence.num_queries);
          if (begin >= end) return;
          function(worker, RowTile{sequence, {head, head + heads_per_work_tile}, {begin, end}},
                   work_tile / (head_work_tiles * tiles));
        };
      });
    };
    if (!splits.enabled()) {
      for_each_tile(1, [](auto& worker, const RowTile& rows, int64_t) { worker.run(rows); });
      continue;
    }
    for_each_tile(splits.count(),
                  [&](auto& worker, const RowTile& rows, int64_t split) { worker.run_split(rows, splits, split); });
    for_each_tile(1, [&](auto& worker, const RowTile& rows, int64_t) { worker.combine(rows, splits); });
  }
}

}  // namespace

void forward(const ForwardParams& params, int64_t keys_per_split) {
  params.element == attention::ElementType::kFloat64 ? forward_as<double>(params, keys_per_split)
                                                     : forward_as<float>(params, keys_per_split);
}

}  // namespace flash_attn_ext::cpu
