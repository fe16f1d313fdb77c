// dBias: dS summed over the bias's broadcast dimensions, with dS recomputed tile by tile (score_gradient.h).
//
// Work item: one tile of the bias itself. Along a dimension that the bias has, an item owns one index (a batch entry, a
// head) or one tile of queries or keys; along a broadcast one it walks all of them in order. So items never share an
// element of the result, and every sum has one order.
#include <algorithm>

#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cpu/score_gradient.h"
#include "kernels/cpu/work_queue.h"

namespace flash_attn_ext::cpu {
namespace {

using attention::BackwardParams;
using attention::BiasGradient;
using attention::Interval;
using attention::Sequence;

// Half-open index ranges that one item walks: batch entries, heads, rows of queries and keys.
struct Item {
  Interval batches;
  Interval heads;
  Interval queries;
  Interval keys;
};

// One dimension of the item grid: a bias that has the dimension cuts it into steps, a broadcast one takes it whole.
struct Axis {
  bool split;
  int64_t length;
  int64_t step;

  int64_t count() const { return split ? num_tiles(length, step) : 1; }
  Interval range(int64_t index) const {
    if (!split) return {0, length};
    return {index * step, std::min((index + 1) * step, length)};
  }
};

template <class Real>
class DbiasWorker {
 public:
  DbiasWorker(const BackwardParams& params, const ScoreGradientOperands<Real>& operands, HeadRange key_heads)
      : p_(params), key_heads_(key_heads), gradient_(params, operands) {}

  void run(const Item& item) {
    for (int64_t batch = item.batches.begin; batch < item.batches.end; ++batch) {
      const Sequence sequence = p_.sequences.at(batch);
      for (int64_t head = item.heads.begin; head < item.heads.end; ++head) {
        const int64_t head_index = batch * p_.num_heads_k + head / p_.queries_per_key_head();
        if (head_index < key_heads_.begin || head_index >= key_heads_.end) continue;
        const int64_t query_end = std::min(item.queries.end, sequence.num_queries);
        for (int64_t query = item.queries.begin; query < query_end; query += kStationaryRows) {
          add_query_tile(sequence, head, {query, std::min(query + kStationaryRows, query_end)}, item.keys);
        }
      }
    }
  }

 private:
  void add_query_tile(const Sequence& sequence, int64_t head, const Interval& queries, const Interval& item_keys) {
    const Interval seen = p_.visibility.keys_of_tile(queries, sequence);
    const Interval keys = {std::max(seen.begin, item_keys.begin), std::min(seen.end, item_keys.end)};
    if (keys.empty()) return;
    gradient_.start(sequence, head, queries);
    for_each_slice(keys, sequence.num_keys, [&](const StreamedSlice& slice) {
      gradient_.compute(slice);
      for (int64_t i = 0; i < queries.end - queries.begin; ++i) {
        add_row(sequence.batch, head, queries.begin + i, slice, gradient_.dscore(slice).row(i));
      }
    });
  }

  void add_row(int64_t batch, int64_t head, int64_t query, const StreamedSlice& keys, const Real* dscore) {
    const BiasGradient& g = p_.dbias;
    Real* target = static_cast<Real*>(g.data) + batch * g.batch_stride + head * g.head_stride + query * g.query_stride +
                   keys.first * g.key_stride;
    if (g.per_key) {
      for (int64_t j = 0; j < keys.count; ++j) target[j] += dscore[j];
    } else {
      *target += sum_row(dscore, keys.count);
    }
  }

  const BackwardParams& p_;
  HeadRange key_heads_;
  ScoreGradient<Real> gradient_;
};

template <class Real>
void backward_dbias_as(const BackwardParams& p) {
  ScoreGradientOperands<Real> operands(p);
  const Axis batches = {p.dbias.per_batch, p.batch, 1};
  const Axis heads = {p.dbias.per_head, p.num_heads_q, 1};
  const Axis queries = {p.dbias.per_query, p.sequences.max_seqlen_q, kStationaryRows};
  const Axis keys = {p.dbias.per_key, p.sequences.max_seqlen_k, kStreamedRows};
  const int64_t num_items = batches.count() * heads.count() * queries.count() * keys.count();
  for (const HeadRange& key_heads : head_groups(p, operands.bytes_per_key_head())) {
    operands.load(key_heads);
    run_items(num_items, [&] {
      return [&, worker = DbiasWorker<Real>(p, operands, key_heads)](int64_t index) mutable {
        Item item;
        item.keys = keys.range(index % keys.count());
        index /= keys.count();
        item.queries = queries.range(index % queries.count());
        index /= queries.count();
        item.heads = heads.range(index % heads.count());
        item.batches = batches.range(index / heads.count());
        worker.run(item);
      };
    });
  }
}

}  // namespace

void backward_dbias(const BackwardParams& params) {
  params.element == attention::ElementType::kFloat64 ? backward_dbias_as<double>(params)
                                                     : backward_dbias_as<float>(params);
}

}  // namespace flash_attn_ext::cpu
