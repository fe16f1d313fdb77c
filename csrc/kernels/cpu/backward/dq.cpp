#include "kernels/cpu/backward/dq.h"

#include <algorithm>

#include "attention/division.h"
#include "kernels/cpu/schedule/tiles.h"
#include "kernels/cpu/schedule/work_queue.h"

namespace flash_attn_ext::cpu {

using attention::Interval;
using attention::Sequence;

template <class Real>
DqSums<Real>::DqSums(const attention::BackwardParams& params) : p_(params) {}

template <class Real>
int64_t DqSums<Real>::bytes_per_key_head() const {
  if (!wanted() || stored_at_once() || in_place()) return 0;
  return p_.queries_per_key_head() * p_.sequences.max_seqlen_q * p_.head_dim_qk * static_cast<int64_t>(sizeof(Real));
}

template <class Real>
template <class Function>
void DqSums<Real>::for_each_tile(Function&& function) const {
  const int64_t tiles = attention::ceil_div(p_.sequences.max_seqlen_q, kStationaryRows);
  const int64_t first_head = key_heads_.begin * p_.queries_per_key_head();
  const int64_t num_heads = key_heads_.end * p_.queries_per_key_head() - first_head;
  run_work_tiles(num_heads * tiles, [&] {
    return [&](int64_t work_tile) {
      const int64_t head_index = first_head + work_tile / tiles;
      const Sequence sequence = p_.sequences.at(head_index / p_.num_heads_q);
      const int64_t begin = work_tile % tiles * kStationaryRows;
      const int64_t end = std::min(begin + kStationaryRows, sequence.num_queries);
      if (begin < end) function(sequence, head_index % p_.num_heads_q, Interval{begin, end});
    };
  });
}

template <class Real>
void DqSums<Real>::start(const HeadRange& key_heads) {
  if (!wanted() || stored_at_once()) return;
  key_heads_ = key_heads;
  storage_.reserve(bytes_per_key_head() / static_cast<int64_t>(sizeof(Real)) * (key_heads.end - key_heads.begin));
  for_each_tile([&](const Sequence& sequence, int64_t head, const Interval& queries) {
    const Block<Real> sums = rows(sequence, head, queries.begin);
    for (int64_t i = 0; i < queries.end - queries.begin; ++i) std::fill_n(sums.row(i), p_.head_dim_qk, Real(0));
  });
}

template <class Real>
Block<Real> DqSums<Real>::rows(const Sequence& sequence, int64_t head, int64_t first) {
  if (in_place()) {
    return {p_.dq.template row<Real>(sequence.batch, head, sequence.query_begin + first), p_.dq.row_stride};
  }
  const int64_t index = sequence.batch * p_.num_heads_q + head - key_heads_.begin * p_.queries_per_key_head();
  return {storage_.data() + (index * p_.sequences.max_seqlen_q + first) * p_.head_dim_qk, p_.head_dim_qk};
}

template <class Real>
void DqSums<Real>::store(const Sequence& sequence, int64_t head, const Interval& queries,
                         Block<const Real> sums) const {
  const RowRange rows = {sequence.batch, head, sequence.query_begin + queries.begin, queries.end - queries.begin};
  store_rows<Real>(dq(), rows, sums, static_cast<Real>(p_.score_mod.scale));
}

template <class Real>
void DqSums<Real>::finish() {
  if (!wanted() || stored_at_once()) return;
  for_each_tile([&](const Sequence& sequence, int64_t head, const Interval& queries) {
    const Block<Real> sums = rows(sequence, head, queries.begin);
    store(sequence, head, queries, {sums.data, sums.stride});
  });
}

template class DqSums<float>;
template class DqSums<double>;

}  // namespace flash_attn_ext::cpu
