// dK and dV, KV-stationary (Dao 2023, "FlashAttention-2", algorithm 2 without its dQ).
//
// Work item: one tile of kStationaryRows keys of one key head. For each query head of its group, in order, and each
// tile of queries that sees it:
//   S^T = K Q^T, dP^T = V dO^T           (Q and dO packed transposed; rows are keys, columns are queries)
//   P^T = exp(score - lse), dS^T = P^T (dP^T - delta)
//   dV += P^T dO, dK += dS^T Q
// The keys' tile alone owns its rows of dK and dV, and every sum has one order.
#include <algorithm>

#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cpu/packed_operand.h"
#include "kernels/cpu/query_statistics.h"
#include "kernels/cpu/row_ops.h"
#include "kernels/cpu/score_row.h"
#include "kernels/cpu/tiles.h"
#include "kernels/cpu/work_queue.h"

namespace flash_attn_ext::cpu {
namespace {

using attention::BackwardParams;
using attention::Interval;
using attention::Sequence;
using attention::TileCoverage;

template <class Real>
struct DkdvOperands {
  PackedOperand<Real> q, q_transposed, dout, dout_transposed;

  explicit DkdvOperands(const BackwardParams& p)
      : q(p, {p.q, p.element, p.head_dim_qk}, Side::kQueries, Form::kRows),
        q_transposed(p, {p.q, p.element, p.head_dim_qk}, Side::kQueries, Form::kTransposed),
        dout(p, {p.dout, p.element, p.head_dim_v}, Side::kQueries, Form::kRows),
        dout_transposed(p, {p.dout, p.element, p.head_dim_v}, Side::kQueries, Form::kTransposed) {}

  int64_t bytes_per_key_head() const {
    return q.bytes_per_key_head() + q_transposed.bytes_per_key_head() + dout.bytes_per_key_head() +
           dout_transposed.bytes_per_key_head();
  }

  void load(const HeadRange& key_heads) {
    for (PackedOperand<Real>* operand : {&q, &q_transposed, &dout, &dout_transposed}) operand->load(key_heads);
  }
};

template <class Real>
class DkdvWorker {
 public:
  DkdvWorker(const BackwardParams& params, const DkdvOperands<Real>& operands, double* alibi_partials)
      : p_(params),
        operands_(operands),
        transform_(params.score_mod.transform<Real, VectorMath>()),
        alibi_partials_(alibi_partials),
        k_rows_(kStationaryRows * params.head_dim_qk),
        v_rows_(kStationaryRows * params.head_dim_v),
        p_tile_(kStationaryRows * kStreamedRows),
        ds_tile_(kStationaryRows * kStreamedRows),
        dk_(kStationaryRows * params.head_dim_qk),
        dv_(kStationaryRows * params.head_dim_v),
        added_tile_(kStationaryRows * kAddedStride),
        added_row_(kStationaryRows),
        keep_(kStreamedRows),
        dscore_(kStreamedRows) {}

  void run(const Sequence& sequence, int64_t key_head, const Interval& keys) {
    sequence_ = sequence;
    keys_ = keys;
    const RowRange rows = {sequence.batch, key_head, sequence.key_begin + keys.begin, num_keys()};
    k_ = load_rows<Real>({p_.k, p_.element, p_.head_dim_qk}, rows, k_rows_.data());
    v_ = load_rows<Real>({p_.v, p_.element, p_.head_dim_v}, rows, v_rows_.data());
    std::fill_n(dk_.data(), num_keys() * p_.head_dim_qk, Real(0));
    std::fill_n(dv_.data(), num_keys() * p_.head_dim_v, Real(0));
    const Interval queries = p_.visibility.queries_of_tile(keys, sequence);
    for (int64_t g = 0; g < p_.queries_per_key_head(); ++g) {
      head_ = key_head * p_.queries_per_key_head() + g;
      for_each_slice(queries, sequence.num_queries, [&](const StreamedSlice& slice) { step(slice); });
    }
    multiply_row(dk_.data(), num_keys() * p_.head_dim_qk, transform_.scale);
    if (p_.dk.data) store_rows<Real>({p_.dk, p_.element, p_.head_dim_qk}, rows, {dk_.data(), p_.head_dim_qk});
    if (p_.dv.data) store_rows<Real>({p_.dv, p_.element, p_.head_dim_v}, rows, {dv_.data(), p_.head_dim_v});
  }

 private:
  // Not a power of 2: the transposing writes of load_added_tile would meet in a few sets of the cache.
  static constexpr int64_t kAddedStride = kStreamedRows + 16;

  int64_t num_keys() const { return keys_.end - keys_.begin; }

  void step(const StreamedSlice& queries) {
    const int64_t width = queries.width;
    multiply({num_keys(), width, p_.head_dim_qk}, k_, columns(operands_.q_transposed, queries), {p_tile_.data(), width},
             Accumulate::kNo);
    multiply({num_keys(), width, p_.head_dim_v}, v_, columns(operands_.dout_transposed, queries),
             {ds_tile_.data(), width}, Accumulate::kNo);

    statistics_.load(p_, sequence_, head_, queries.first, queries.count, width);
    if (!plain()) load_added_tile(queries);
    const Interval query_range = {queries.first, queries.first + queries.count};
    const bool full = p_.visibility.coverage(query_range, keys_, sequence_) == TileCoverage::kFull;
    for (int64_t i = 0; i < num_keys(); ++i) {
      const Interval seen =
          full ? Interval{0, queries.count} : within(p_.visibility.queries_of(keys_.begin + i, sequence_), queries);
      gradient_row(keys_.begin + i, queries, seen, p_tile_.data() + i * width, ds_tile_.data() + i * width);
    }
    accumulate(operands_.dout, queries, p_tile_, {dv_.data(), p_.head_dim_v}, p_.head_dim_v);
    accumulate(operands_.q, queries, ds_tile_, {dk_.data(), p_.head_dim_qk}, p_.head_dim_qk);
  }

  bool plain() const { return p_.score_mod.plain() && !p_.dropout.enabled(); }

  // What is added to the tile's scores, transposed as they are. Read along keys, in which biases and masks are usually
  // contiguous: along queries each element would be in a cache line of its own.
  void load_added_tile(const StreamedSlice& queries) {
    for (int64_t i = 0; i < queries.count; ++i) {
      const ScoreRun run = {{sequence_.batch, head_, queries.first + i, keys_.begin}, num_keys(), Along::kKeys};
      load_added(p_.score_mod, run, p_.visibility.diagonal(sequence_), added_row_.data());
      for (int64_t key = 0; key < num_keys(); ++key)
        added_tile_.data()[key * kAddedStride + i] = added_row_.data()[key];
    }
  }

  // Products and dP of one key become P and dS; queries that do not see it get 0.
  void gradient_row(int64_t key, const StreamedSlice& queries, const Interval& seen, Real* p_row, Real* ds_row) {
    for (Real* row : {p_row, ds_row}) {
      std::fill(row, row + seen.begin, Real(0));
      std::fill(row + seen.end, row + queries.count, Real(0));
    }
    if (seen.empty()) return;
    const int64_t n = seen.end - seen.begin;
    Real* p = p_row + seen.begin;
    const GradientRow<Real> row = {.n = n,
                                   .product = p,
                                   .p = p,
                                   .dproduct = ds_row + seen.begin,
                                   .lse = statistics_.lse() + seen.begin,
                                   .residual = statistics_.residual() + seen.begin,
                                   .delta = statistics_.delta() + seen.begin,
                                   .added = added_tile_.data() + (key - keys_.begin) * kAddedStride + seen.begin,
                                   .keep = keep_.data(),
                                   .dscore = dscore_.data()};
    if (plain()) return gradient_row_plain(row, transform_.scale, Statistics::kPerElement);
    const ScoreRun run = {{sequence_.batch, head_, queries.first + seen.begin, key}, n, Along::kQueries};
    const int64_t diagonal = p_.visibility.diagonal(sequence_);
    load_keep(p_.dropout, run, keep_.data());
    gradient_row_extended(row, transform_, Statistics::kPerElement);
    if (alibi_partials_) {
      alibi_partials_[alibi_slot()] += alibi_slope_gradient(run, diagonal, dscore_.data());
    }
  }

  void accumulate(const PackedOperand<Real>& operand, const StreamedSlice& queries, const Scratch<Real>& tile,
                  Block<Real> result, int64_t num_columns) {
    Block<const Real> b = operand.tile(sequence_.batch, head_, queries.tile);
    b.data += queries.offset_in_tile() * b.stride;
    const GemmShape shape = {num_keys(), num_columns, queries.count};
    const Block<const Real> a = {tile.data(), queries.width};
    if (operand.finite(sequence_.batch, head_, queries.tile)) {
      multiply(shape, a, b, result, Accumulate::kYes);
    } else {
      accumulate_nonzero(shape, a, b, result);
    }
  }

  Block<const Real> columns(const PackedOperand<Real>& transposed, const StreamedSlice& queries) const {
    Block<const Real> block = transposed.tile(sequence_.batch, head_, queries.tile);
    block.data += queries.offset_in_tile();
    return block;
  }

  // A partial sum for each (batch, query head, key tile), added up in order afterwards.
  int64_t alibi_slot() const {
    const int64_t tiles = num_tiles(p_.sequences.max_seqlen_k, kStationaryRows);
    return (sequence_.batch * p_.num_heads_q + head_) * tiles + keys_.begin / kStationaryRows;
  }

  const BackwardParams& p_;
  const DkdvOperands<Real>& operands_;
  const Transform<Real> transform_;
  double* alibi_partials_;
  Scratch<Real> k_rows_, v_rows_, p_tile_, ds_tile_, dk_, dv_, added_tile_, added_row_, keep_, dscore_;
  QueryStatistics<Real> statistics_;
  Block<const Real> k_{}, v_{};
  Sequence sequence_{};
  int64_t head_ = 0;
  Interval keys_{};
};

template <class Real>
void backward_dkdv_as(const BackwardParams& p) {
  DkdvOperands<Real> operands(p);
  const int64_t tiles = num_tiles(p.sequences.max_seqlen_k, kStationaryRows);
  std::vector<double> alibi_partials(p.dalibi_slopes ? p.batch * p.num_heads_q * tiles : 0, 0.0);
  for (const HeadRange& key_heads : head_groups(p, operands.bytes_per_key_head())) {
    operands.load(key_heads);
    const int64_t num_heads = key_heads.end - key_heads.begin;
    run_items(num_heads * tiles, [&] {
      double* partials = alibi_partials.empty() ? nullptr : alibi_partials.data();
      return [&, worker = DkdvWorker<Real>(p, operands, partials)](int64_t item) mutable {
        const int64_t head_index = key_heads.begin + item % num_heads;
        const int64_t begin = item / num_heads * kStationaryRows;  // the first keys are seen by most: first
        const Sequence sequence = p.sequences.at(head_index / p.num_heads_k);
        const int64_t end = std::min(begin + kStationaryRows, sequence.num_keys);
        if (begin < end) worker.run(sequence, head_index % p.num_heads_k, {begin, end});
      };
    });
  }
  for (int64_t i = 0; p.dalibi_slopes && i < p.batch * p.num_heads_q; ++i) {
    double sum = 0.0;
    for (int64_t tile = 0; tile < tiles; ++tile) sum += alibi_partials[i * tiles + tile];
    static_cast<Real*>(p.dalibi_slopes)[i] = static_cast<Real>(sum);
  }
}

}  // namespace

void backward_dkdv(const BackwardParams& params) {
  params.element == attention::ElementType::kFloat64 ? backward_dkdv_as<double>(params)
                                                     : backward_dkdv_as<float>(params);
}

}  // namespace flash_attn_ext::cpu
