// Backward pass: dQ, dK, dV, dBias and dslope in five GEMMs (Dao 2023, "FlashAttention-2", algorithm 2).
//
// Work tile: one tile of kStreamedRows keys of one key head. For each tile of kStationaryRows queries that sees it, in
// order, and each query head of the group, in order:
//   S = Q K^T, dP = dO V^T                  (K and V packed transposed; rows are queries)
//   P = exp(score - lse), dS = P (dP - delta)
//   dV += P^T dO, dK += dS^T Q              (only the work tile adds to these: key_sums.h)
//   dQ += dS K                              (tiles of keys add in the order of their ranks: order_semaphores.h; if
//                                            all keys fit one tile, it stores dQ at once)
// So every sum has one order, whichever threads run the work tiles.
#include <algorithm>
#include <memory>
#include <vector>

#include "attention/division.h"
#include "kernels/cpu/backward/dbias.h"
#include "kernels/cpu/backward/dq.h"
#include "kernels/cpu/backward/key_sums.h"
#include "kernels/cpu/backward/score_gradient.h"
#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cpu/schedule/order_semaphores.h"
#include "kernels/cpu/schedule/work_queue.h"

namespace flash_attn_ext::cpu {
namespace {

using attention::BackwardParams;
using attention::Interval;
using attention::Sequence;

template <class Real>
struct BackwardOperands {
  bool one_tile;  // all keys fit one tile: each thread packs the operands of its head
  bool wants_dq;
  ScoreGradientOperands<Real> scores;
  PackedOperand<Real> k;

  explicit BackwardOperands(const BackwardParams& p)
      : one_tile(one_tile_of_keys(p)),
        wants_dq(p.dq.data != nullptr),
        scores(p),
        k(p, {p.k, p.element, p.head_dim_qk}, Form::kRows) {}

  // Bytes of the operands that are packed for all threads.
  int64_t bytes_per_key_head() const {
    return one_tile ? 0 : scores.bytes_per_key_head() + (wants_dq ? k.bytes_per_key_head() : 0);
  }

  void load(const HeadRange& key_heads) {
    scores.load(key_heads);
    if (wants_dq) k.load(key_heads);
  }
};

template <class Real>
class BackwardWorker {
 public:
  BackwardWorker(const BackwardParams& params, const BackwardOperands<Real>& shared, DqSums<Real>& dq,
                 double* alibi_partials)
      : p_(params),
        own_(shared.one_tile ? std::make_unique<BackwardOperands<Real>>(params) : nullptr),
        operands_(own_ ? *own_ : shared),
        gradient_(params, operands_.scores),
        dq_(dq),
        dk_({params.dk, params.element, params.head_dim_qk}, {params.q, params.element, params.head_dim_qk}),
        dv_({params.dv, params.element, params.head_dim_v}, {params.dout, params.element, params.head_dim_v}),
        dbias_(params),
        alibi_partials_(alibi_partials),
        dq_tile_(dq.stored_at_once() ? kStationaryRows * params.head_dim_qk : 0) {}

  void run(const Sequence& sequence, int64_t key_head, const Interval& keys, OrderSemaphores::Rank& rank) {
    sequence_ = sequence;
    keys_ = keys;
    const int64_t head_index = sequence.batch * p_.num_heads_k + key_head;
    if (own_) own_->load({head_index, head_index + 1});
    dk_.start(keys.end - keys.begin);
    dv_.start(keys.end - keys.begin);
    dbias_.start(key_head, keys.begin);
    // A work tile that stores dQ also stores the 0 of queries that see no key.
    const Interval queries =
        dq_.stored_at_once() ? Interval{0, sequence.num_queries} : p_.visibility.queries_of_tile(keys, sequence);
    for (int64_t tile = queries.begin / kStationaryRows; tile * kStationaryRows < queries.end; ++tile) {
      const int64_t begin = tile * kStationaryRows;
      const Interval rows = {begin, std::min(begin + kStationaryRows, sequence.num_queries)};
      for (int64_t g = 0; g < p_.queries_per_key_head(); ++g) {
        query_tile(key_head * p_.queries_per_key_head() + g, rows, [&] { rank.wait(tile); });
      }
      rank.signal(tile);
    }
    const RowRange rows = {sequence.batch, key_head, sequence.key_begin + keys.begin, keys.end - keys.begin};
    dk_.store(rows, p_.score_mod.scale);
    dv_.store(rows, 1.0);
    if (DbiasSums<Real>::shared(p_.dbias)) rank.wait_for_all();
    dbias_.finish(sequence.batch, keys.end - keys.begin);
  }

 private:
  // Whether anything but dV is wanted.
  bool wants_ds() const { return p_.dq.data || p_.dk.data || p_.dbias.present() || alibi_partials_; }

  // wait_for_rank() returns when all work tiles of lower rank have added their sums for these queries.
  template <class Wait>
  void query_tile(int64_t head, const Interval& queries, Wait&& wait_for_rank) {
    Interval seen = p_.visibility.keys_of_tile(queries, sequence_);
    seen = {std::max(seen.begin, keys_.begin), std::min(seen.end, keys_.end)};
    if (seen.empty()) {
      if (dq_.stored_at_once()) store_no_dq(head, queries);
      return;
    }
    gradient_.start(sequence_, head, queries);
    const RowRange rows = {sequence_.batch, head, sequence_.query_begin + queries.begin, queries.end - queries.begin};
    for_each_slice(seen, sequence_.num_keys, gradient_.clip(), [&](const StreamedSlice& keys) {
      if (!gradient_.sees(keys)) {
        if (dq_.stored_at_once()) store_no_dq(head, queries);
        return;
      }
      gradient_.multiply(keys, wants_ds());
      if (DbiasSums<Real>::shared_by_rows(p_)) wait_for_rank();
      gradient_.differentiate(keys, [&](const ScoreRun& run, const Real* dscore) {
        dbias_.add(run, dscore);
        if (alibi_partials_) add_slope_gradient(run, dscore);
      });
      dv_.add(rows, keys.first - keys_.begin, keys.count, gradient_.p(keys));
      dk_.add(rows, keys.first - keys_.begin, keys.count, gradient_.ds(keys));
      if (dq_.stored_at_once()) {
        const Block<Real> dq = {dq_tile_.data(), p_.head_dim_qk};
        multiply_by_k(keys, dq, Accumulate::kNo);
        dq_.store(sequence_, head, queries, {dq.data, dq.stride});
      } else if (dq_.wanted()) {
        wait_for_rank();
        multiply_by_k(keys, dq_.rows(sequence_, head, queries.begin), Accumulate::kYes);
      }
    });
  }

  void store_no_dq(int64_t head, const Interval& queries) {
    std::fill_n(dq_tile_.data(), (queries.end - queries.begin) * p_.head_dim_qk, Real(0));
    dq_.store(sequence_, head, queries, {dq_tile_.data(), p_.head_dim_qk});
  }

  // dq (+)= dS . K.
  void multiply_by_k(const StreamedSlice& keys, Block<Real> dq, Accumulate mode) {
    const int64_t key_head = gradient_.head() / p_.queries_per_key_head();
    Block<const Real> k = operands_.k.tile(sequence_.batch, key_head, keys.tile);
    k.data += keys.offset_in_tile() * k.stride;
    const GemmShape shape = {gradient_.num_queries(), p_.head_dim_qk, keys.count};
    if (operands_.k.finite(sequence_.batch, key_head, keys.tile)) {
      multiply(shape, gradient_.ds(keys), k, dq, mode);
      return;
    }
    for (int64_t i = 0; mode == Accumulate::kNo && i < shape.m; ++i) std::fill_n(dq.row(i), shape.n, Real(0));
    multiply_nonzero(shape, gradient_.ds(keys), k, dq);
  }

  // Adds to a partial sum for each (batch, query head, tile of keys). These are added up in order at the end.
  void add_slope_gradient(const ScoreRun& run, const Real* dscore) {
    const int64_t tiles = attention::ceil_div(p_.sequences.max_seqlen_k, kStreamedRows);
    const int64_t head_index = run.first.batch * p_.num_heads_q + run.first.head;
    alibi_partials_[head_index * tiles + keys_.begin / kStreamedRows] +=
        alibi_slope_gradient(run, p_.visibility.diagonal(sequence_), dscore);
  }

  const BackwardParams& p_;
  const std::unique_ptr<BackwardOperands<Real>> own_;  // of the current head if threads pack for themselves, else null
  const BackwardOperands<Real>& operands_;
  ScoreGradient<Real> gradient_;
  DqSums<Real>& dq_;
  KeySums<Real> dk_, dv_;
  DbiasSums<Real> dbias_;
  double* alibi_partials_;
  Scratch<Real> dq_tile_;
  Sequence sequence_{};
  Interval keys_{};
};

template <class Real>
void backward_as(const BackwardParams& p) {
  BackwardOperands<Real> operands(p);
  DqSums<Real> dq(p);
  const int64_t tiles = attention::ceil_div(p.sequences.max_seqlen_k, kStreamedRows);
  std::vector<double> alibi_partials(p.dalibi_slopes ? p.batch * p.num_heads_q * tiles : 0, 0.0);
  for (const HeadRange& key_heads : head_groups(p, operands.bytes_per_key_head() + dq.bytes_per_key_head())) {
    if (!operands.one_tile) operands.load(key_heads);
    dq.start(key_heads);
    const int64_t num_heads = key_heads.end - key_heads.begin;
    // The tiles of keys of a head share its dQ. All work tiles share a bias that is broadcast along batch entries or
    // heads.
    const bool shares_dq = dq.wanted() && !dq.stored_at_once();
    const int64_t distance = DbiasSums<Real>::shared(p.dbias) ? 1 : shares_dq ? num_heads : 0;
    OrderSemaphores semaphores(num_heads * tiles, distance);
    run_work_tiles(num_heads * tiles, distance == 0 ? grain_of_neighbours(num_heads * tiles) : 1, [&] {
      double* partials = alibi_partials.empty() ? nullptr : alibi_partials.data();
      return [&, worker = BackwardWorker<Real>(p, operands, dq, partials)](int64_t work_tile) mutable {
        OrderSemaphores::Rank rank(semaphores, work_tile);
        const int64_t head_index = key_heads.begin + work_tile % num_heads;
        const int64_t begin = work_tile / num_heads * kStreamedRows;  // most queries see the first keys: these go first
        const Sequence sequence = p.sequences.at(head_index / p.num_heads_k);
        const int64_t end = std::min(begin + kStreamedRows, sequence.num_keys);
        if (begin < end || dq.stored_at_once()) worker.run(sequence, head_index % p.num_heads_k, {begin, end}, rank);
      };
    });
    dq.finish();
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
