// dQ, Q-stationary: dQ = scale * dS K, with dS recomputed tile by tile (score_gradient.h).
//
// Work item: one tile of kStationaryRows queries of one head, streaming over the key tiles that it sees, in order.
#include <algorithm>

#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cpu/score_gradient.h"
#include "kernels/cpu/work_queue.h"

namespace flash_attn_ext::cpu {
namespace {

using attention::BackwardParams;
using attention::Interval;
using attention::Sequence;

template <class Real>
class DqWorker {
 public:
  DqWorker(const BackwardParams& params, const ScoreGradientOperands<Real>& operands, const PackedOperand<Real>& k)
      : p_(params), k_(k), gradient_(params, operands), dq_(kStationaryRows * params.head_dim_qk) {}

  void run(const Sequence& sequence, int64_t head, const Interval& queries) {
    const int64_t num_queries = queries.end - queries.begin;
    const Block<Real> dq = {dq_.data(), p_.head_dim_qk};
    std::fill_n(dq.data, num_queries * p_.head_dim_qk, Real(0));
    gradient_.start(sequence, head, queries);
    const int64_t key_head = head / p_.queries_per_key_head();
    for_each_slice(p_.visibility.keys_of_tile(queries, sequence), sequence.num_keys, [&](const StreamedSlice& keys) {
      gradient_.compute(keys);
      Block<const Real> k = k_.tile(sequence.batch, key_head, keys.tile);
      k.data += keys.offset_in_tile() * k.stride;
      const GemmShape shape = {num_queries, p_.head_dim_qk, keys.count};
      if (k_.finite(sequence.batch, key_head, keys.tile)) {
        multiply(shape, gradient_.dproduct(keys), k, dq, Accumulate::kYes);
      } else {
        accumulate_nonzero(shape, gradient_.dproduct(keys), k, dq);
      }
    });
    multiply_row(dq.data, num_queries * p_.head_dim_qk, static_cast<Real>(p_.score_mod.scale));
    const RowRange rows = {sequence.batch, head, sequence.query_begin + queries.begin, num_queries};
    store_rows<Real>({p_.dq, p_.element, p_.head_dim_qk}, rows, {dq.data, dq.stride});
  }

 private:
  const BackwardParams& p_;
  const PackedOperand<Real>& k_;
  ScoreGradient<Real> gradient_;
  Scratch<Real> dq_;
};

template <class Real>
void backward_dq_as(const BackwardParams& p) {
  ScoreGradientOperands<Real> operands(p);
  PackedOperand<Real> k(p, {p.k, p.element, p.head_dim_qk}, Side::kKeys, Form::kRows);
  const int64_t tiles = num_tiles(p.sequences.max_seqlen_q, kStationaryRows);
  for (const HeadRange& key_heads : head_groups(p, operands.bytes_per_key_head() + k.bytes_per_key_head())) {
    operands.load(key_heads);
    k.load(key_heads);
    const int64_t first_head = key_heads.begin * p.queries_per_key_head();
    const int64_t num_heads = (key_heads.end - key_heads.begin) * p.queries_per_key_head();
    run_items(num_heads * tiles, [&] {
      return [&, worker = DqWorker<Real>(p, operands, k)](int64_t item) mutable {
        const int64_t head_index = first_head + item % num_heads;
        const int64_t begin = (tiles - 1 - item / num_heads) * kStationaryRows;  // the last queries see most: first
        const Sequence sequence = p.sequences.at(head_index / p.num_heads_q);
        const int64_t end = std::min(begin + kStationaryRows, sequence.num_queries);
        if (begin < end) worker.run(sequence, head_index % p.num_heads_q, {begin, end});
      };
    });
  }
}

}  // namespace

void backward_dq(const BackwardParams& params) {
  params.element == attention::ElementType::kFloat64 ? backward_dq_as<double>(params) : backward_dq_as<float>(params);
}

}  // namespace flash_attn_ext::cpu
