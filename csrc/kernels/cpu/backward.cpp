// Backward pass: dQ, dK, dV, dBias and dslope in five products (Dao 2023, "FlashAttention-2", algorithm 2).
//
// Work item: one tile of kStreamedRows keys of one key head. For each tile of kStationaryRows queries that sees it, in
// order, and each query head of the group, in order:
//   S = Q K^T, dP = dO V^T                  (K and V packed transposed; rows are queries)
//   P = exp(score - lse), dS = P (dP - delta)
//   dV^T += dO^T P, dK^T += Q^T dS          (dO and Q packed transposed; only the item adds to these)
//   dQ += dS K                              (the tiles of keys take turns: turns.h)
// So every sum has one order, whichever threads run the items.
#include <algorithm>
#include <vector>

#include "kernels/cpu/backward_dbias.h"
#include "kernels/cpu/backward_dq.h"
#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cpu/score_gradient.h"
#include "kernels/cpu/turns.h"
#include "kernels/cpu/work_queue.h"

namespace flash_attn_ext::cpu {
namespace {

using attention::BackwardParams;
using attention::Interval;
using attention::Sequence;

template <class Real>
struct BackwardOperands {
  ScoreGradientOperands<Real> scores;
  std::vector<PackedOperand<Real>*> wanted;
  PackedOperand<Real> k, q_transposed, dout_transposed;
  DqSums<Real> dq;

  explicit BackwardOperands(const BackwardParams& p)
      : scores(p),
        k(p, {p.k, p.element, p.head_dim_qk}, Side::kKeys, Form::kRows),
        q_transposed(p, {p.q, p.element, p.head_dim_qk}, Side::kQueries, Form::kTransposed),
        dout_transposed(p, {p.dout, p.element, p.head_dim_v}, Side::kQueries, Form::kTransposed),
        dq(p) {
    if (p.dq.data) wanted.push_back(&k);
    if (p.dk.data) wanted.push_back(&q_transposed);
    if (p.dv.data) wanted.push_back(&dout_transposed);
  }
  BackwardOperands(const BackwardOperands&) = delete;
  BackwardOperands& operator=(const BackwardOperands&) = delete;

  int64_t bytes_per_key_head() const {
    int64_t bytes = scores.bytes_per_key_head() + dq.bytes_per_key_head();
    for (const PackedOperand<Real>* operand : wanted) bytes += operand->bytes_per_key_head();
    return bytes;
  }

  void load(const HeadRange& key_heads) {
    scores.load(key_heads);
    for (PackedOperand<Real>* operand : wanted) operand->load(key_heads);
    dq.start(key_heads);
  }
};

template <class Real>
class BackwardWorker {
 public:
  BackwardWorker(const BackwardParams& params, BackwardOperands<Real>& operands, double* alibi_partials)
      : p_(params),
        operands_(operands),
        gradient_(params, operands.scores),
        dbias_(params),
        alibi_partials_(alibi_partials),
        dk_transposed_(params.head_dim_qk * kStreamedRows),
        dv_transposed_(params.head_dim_v * kStreamedRows) {}

  void run(const Sequence& sequence, int64_t key_head, const Interval& keys, Turns::Turn& turn) {
    sequence_ = sequence;
    keys_ = keys;
    const int64_t width = num_tiles(keys.end - keys.begin, kClipRows) * kClipRows;
    for (int64_t j = 0; j < p_.head_dim_qk; ++j) std::fill_n(dk_sums().row(j), width, Real(0));
    for (int64_t j = 0; j < p_.head_dim_v; ++j) std::fill_n(dv_sums().row(j), width, Real(0));
    dbias_.start(key_head, keys.begin);
    const Interval queries = p_.visibility.queries_of_tile(keys, sequence);
    for (int64_t tile = queries.begin / kStationaryRows; tile * kStationaryRows < queries.end; ++tile) {
      const int64_t begin = tile * kStationaryRows;
      const Interval rows = {begin, std::min(begin + kStationaryRows, sequence.num_queries)};
      for (int64_t g = 0; g < p_.queries_per_key_head(); ++g) {
        query_tile(key_head * p_.queries_per_key_head() + g, rows, [&] { turn.wait(tile); });
      }
      turn.pass(tile);
    }
    const RowRange rows = {sequence.batch, key_head, sequence.key_begin + keys.begin, keys.end - keys.begin};
    const Real scale = static_cast<Real>(p_.score_mod.scale);
    if (p_.dk.data)
      store_transposed<Real>({p_.dk, p_.element, p_.head_dim_qk}, rows, {dk_transposed_.data(), kStreamedRows}, scale);
    if (p_.dv.data)
      store_transposed<Real>({p_.dv, p_.element, p_.head_dim_v}, rows, {dv_transposed_.data(), kStreamedRows}, Real(1));
    if (DbiasSums<Real>::shared(p_.dbias)) turn.wait_for_all();
    dbias_.finish(sequence.batch, keys.end - keys.begin);
  }

 private:
  // Whether anything but dV is wanted.
  bool wants_ds() const { return p_.dq.data || p_.dk.data || p_.dbias.present() || alibi_partials_; }

  // wait_for_turn() returns when the items before have added what they add for these queries.
  template <class Wait>
  void query_tile(int64_t head, const Interval& queries, Wait&& wait_for_turn) {
    Interval seen = p_.visibility.keys_of_tile(queries, sequence_);
    seen = {std::max(seen.begin, keys_.begin), std::min(seen.end, keys_.end)};
    if (seen.empty()) return;
    gradient_.start(sequence_, head, queries);
    for_each_slice(seen, sequence_.num_keys, [&](const StreamedSlice& keys) {
      gradient_.multiply(keys, wants_ds());
      if (DbiasSums<Real>::shared_by_rows(p_.dbias)) wait_for_turn();
      gradient_.differentiate(keys, [&](const ScoreRun& run, const Real* dscore) {
        dbias_.add(run, dscore);
        if (alibi_partials_) add_slope_gradient(run, dscore);
      });
      if (p_.dv.data) add_transposed(operands_.dout_transposed, queries, keys, gradient_.p(keys), dv_sums());
      if (p_.dk.data) add_transposed(operands_.q_transposed, queries, keys, gradient_.ds(keys), dk_sums());
      if (p_.dq.data) {
        wait_for_turn();
        add_to_dq(head, queries, keys);
      }
    });
  }

  // sums (columns of the operand x keys) += operand^T . weights.
  void add_transposed(const PackedOperand<Real>& transposed, const Interval& queries, const StreamedSlice& keys,
                      Block<const Real> weights, Block<Real> sums) {
    const int64_t tile = queries.begin / kStreamedRows;
    const int64_t head = gradient_.head();
    Block<const Real> a = transposed.tile(sequence_.batch, head, tile);
    a.data += queries.begin - tile * kStreamedRows;
    sums.data += keys.first - keys_.begin;
    const GemmShape shape = {transposed.columns(), keys.width, queries.end - queries.begin};
    if (transposed.finite(sequence_.batch, head, tile)) {
      multiply(shape, a, weights, sums, Accumulate::kYes);
    } else {
      multiply_nonzero(shape, a, weights, sums, Weights::kRight);
    }
  }

  void add_to_dq(int64_t head, const Interval& queries, const StreamedSlice& keys) {
    const int64_t key_head = head / p_.queries_per_key_head();
    Block<const Real> k = operands_.k.tile(sequence_.batch, key_head, keys.tile);
    k.data += keys.offset_in_tile() * k.stride;
    const Block<Real> dq = operands_.dq.rows(sequence_, head, queries.begin);
    const GemmShape shape = {queries.end - queries.begin, p_.head_dim_qk, keys.count};
    if (operands_.k.finite(sequence_.batch, key_head, keys.tile)) {
      multiply(shape, gradient_.ds(keys), k, dq, Accumulate::kYes);
    } else {
      multiply_nonzero(shape, gradient_.ds(keys), k, dq, Weights::kLeft);
    }
  }

  // To a partial sum for each (batch, query head, tile of keys); they are added up in order afterwards.
  void add_slope_gradient(const ScoreRun& run, const Real* dscore) {
    const int64_t tiles = num_tiles(p_.sequences.max_seqlen_k, kStreamedRows);
    const int64_t head_index = run.first.batch * p_.num_heads_q + run.first.head;
    alibi_partials_[head_index * tiles + keys_.begin / kStreamedRows] +=
        alibi_slope_gradient(run, p_.visibility.diagonal(sequence_), dscore);
  }

  Block<Real> dk_sums() { return {dk_transposed_.data(), kStreamedRows}; }
  Block<Real> dv_sums() { return {dv_transposed_.data(), kStreamedRows}; }

  const BackwardParams& p_;
  BackwardOperands<Real>& operands_;
  ScoreGradient<Real> gradient_;
  DbiasSums<Real> dbias_;
  double* alibi_partials_;
  Scratch<Real> dk_transposed_, dv_transposed_;  // (head dim, kStreamedRows)
  Sequence sequence_{};
  Interval keys_{};
};

template <class Real>
void backward_as(const BackwardParams& p) {
  BackwardOperands<Real> operands(p);
  const int64_t tiles = num_tiles(p.sequences.max_seqlen_k, kStreamedRows);
  std::vector<double> alibi_partials(p.dalibi_slopes ? p.batch * p.num_heads_q * tiles : 0, 0.0);
  for (const HeadRange& key_heads : head_groups(p, operands.bytes_per_key_head())) {
    operands.load(key_heads);
    const int64_t num_heads = key_heads.end - key_heads.begin;
    // Tiles of keys share a head's dQ, and all items a bias that some dimension of theirs is broadcast along.
    Turns turns(num_heads * tiles, DbiasSums<Real>::shared(p.dbias) ? 1 : p.dq.data ? num_heads : 0);
    run_items(num_heads * tiles, [&] {
      double* partials = alibi_partials.empty() ? nullptr : alibi_partials.data();
      return [&, worker = BackwardWorker<Real>(p, operands, partials)](int64_t item) mutable {
        Turns::Turn turn(turns, item);
        const int64_t head_index = key_heads.begin + item % num_heads;
        const int64_t begin = item / num_heads * kStreamedRows;  // the first keys are seen by most: first
        const Sequence sequence = p.sequences.at(head_index / p.num_heads_k);
        const int64_t end = std::min(begin + kStreamedRows, sequence.num_keys);
        if (begin < end) worker.run(sequence, head_index % p.num_heads_k, {begin, end}, turn);
      };
    });
    operands.dq.finish();
  }
  for (int64_t i = 0; p.dalibi_slopes && i < p.batch * p.num_heads_q; ++i) {
    double sum = 0.0;
    for (int64_t tile = 0; tile < tiles; ++tile) sum += alibi_partials[i * tiles + tile];
    static_cast<Real*>(p.dalibi_slopes)[i] = static_cast<Real>(sum);
  }
}

}  // namespace

void backward(const BackwardParams& params) {
  params.element == attention::ElementType::kFloat64 ? backward_as<double>(params) : backward_as<float>(params);
}

}  // namespace flash_attn_ext::cpu
