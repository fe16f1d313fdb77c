// delta = sum over keys of P dP, minus dlse, from recomputed P and dP (score_gradient.h with delta = 0 gives P dP).
//
// It equals rowsum(dout * out) - dlse for the exact out. A 16-bit out is rounded, and the error that this leaves in
// delta is all that remains where dS cancels: over a row (a bias that is constant along keys has gradient 0), or where
// a query sees one key only.
//
// Work tile: one tile of kStationaryRows queries of one head, streaming over the key tiles that it sees, in order.
#include <algorithm>
#include <vector>

#include "attention/division.h"
#include "kernels/cpu/backward/score_gradient.h"
#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cpu/schedule/work_queue.h"

namespace flash_attn_ext::cpu {
namespace {

using attention::BackwardParams;
using attention::Interval;
using attention::Sequence;

class DeltaWorker {
 public:
  DeltaWorker(const BackwardParams& params, const ScoreGradientOperands<float>& operands)
      : p_(params), gradient_(params, operands), sums_(kStationaryRows) {}

  void run(const Sequence& sequence, int64_t head, const Interval& queries, float* delta) {
    const int64_t num_queries = queries.end - queries.begin;
    std::fill_n(sums_.begin(), num_queries, 0.0);
    gradient_.start(sequence, head, queries);
    const Interval seen = p_.visibility.keys_of_tile(queries, sequence);
    for_each_slice(seen, sequence.num_keys, gradient_.clip(), [&](const StreamedSlice& keys) {
      if (!gradient_.sees(keys)) return;
      gradient_.multiply(keys, /*with_dp=*/true);
      gradient_.differentiate(keys, [&](const ScoreRun& run, const float* p_dp) {
        sums_[run.first.query - queries.begin] += sum_row(p_dp, run.count);
      });
    });
    for (int64_t i = 0; i < num_queries; ++i) {
      const int64_t row = sequence.query_begin + queries.begin + i;
      if (p_.dlse.present()) sums_[i] -= *p_.dlse.at<const float>(sequence.batch, head, row);
      delta[i] = static_cast<float>(sums_[i]);
    }
  }

 private:
  const BackwardParams& p_;
  ScoreGradient<float> gradient_;
  std::vector<double> sums_;
};

}  // namespace

void backward_delta(const BackwardParams& params) {
  ScoreGradientOperands<float> operands(params);
  const int64_t tiles = attention::ceil_div(params.sequences.max_seqlen_q, kStationaryRows);
  for (const HeadRange& key_heads : head_groups(params, operands.bytes_per_key_head())) {
    operands.load(key_heads);
    const int64_t first_head = key_heads.begin * params.queries_per_key_head();
    const int64_t num_heads = (key_heads.end - key_heads.begin) * params.queries_per_key_head();
    run_work_tiles(num_heads * tiles, [&] {
      return [&, worker = DeltaWorker(params, operands)](int64_t work_tile) mutable {
        const int64_t head_index = first_head + work_tile % num_heads;
        const int64_t begin = (tiles - 1 - work_tile / num_heads) * kStationaryRows;  // longest first: the last queries
        const int64_t head = head_index % params.num_heads_q;
        const Sequence sequence = params.sequences.at(head_index / params.num_heads_q);
        const int64_t end = std::min(begin + kStationaryRows, sequence.num_queries);
        if (begin >= end) return;
        float* delta = params.delta.at<float>(sequence.batch, head, sequence.query_begin + begin);
        std::fill(delta, delta + (end - begin), 0.0f);  // dS with delta = 0 is P dP
        worker.run(sequence, head, {begin, end}, delta);
      };
    });
  }
}

}  // namespace flash_attn_ext::cpu
