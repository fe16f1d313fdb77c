#include "kernels/cpu/backward/dbias.h"

#include <algorithm>

#include "kernels/config/cpu.h"
#include "kernels/cpu/rows/row_ops.h"

namespace flash_attn_ext::cpu {

template <class Real>
DbiasSums<Real>::DbiasSums(const attention::BackwardParams& params) : p_(params) {
  is_relative_ = p_.dbias.present() && p_.score_mod.bias.is_relative();
  local_columns_ = kStreamedRows + (is_relative_ ? p_.sequences.max_seqlen_q - 1 : 0);
  if (has_local_sums()) local_.reserve(num_local_rows() * local_columns_);
}

template <class Real>
Real* DbiasSums<Real>::target(const attention::Coordinate& at) const {
  const attention::BiasGradient& g = p_.dbias;
  return static_cast<Real*>(g.data) + at.batch * g.batch_stride + at.head * g.head_stride + at.query * g.query_stride +
         at.key * g.key_stride;
}

template <class Real>
void DbiasSums<Real>::start(int64_t key_head, int64_t first_key) {
  if (!has_local_sums()) return;
  first_head_ = key_head * p_.queries_per_key_head();
  first_key_ = first_key;
  std::fill_n(local_.data(), num_local_rows() * local_columns_, Real(0));
}

template <class Real>
void DbiasSums<Real>::add(const ScoreRun& run, const Real* dscore) {
  if (!p_.dbias.present()) return;
  if (!has_local_sums()) return add_row(target(run.first), dscore, run.count);
  const int64_t row = p_.dbias.per_head ? run.first.head - first_head_ : 0;
  add_row(local_.data() + row * local_columns_ + local_column(run.first), dscore, run.count);
}

template <class Real>
void DbiasSums<Real>::finish(int64_t batch, int64_t num_keys) {
  if (!has_local_sums()) return;
  const int64_t last_query = is_relative_ ? p_.sequences.max_seqlen_q - 1 : 0;
  for (int64_t row = 0; row < num_local_rows(); ++row) {
    Real* sums = target({batch, first_head_ + row, last_query, first_key_});
    add_row(sums, local_.data() + row * local_columns_, last_query + num_keys);
  }
}

template <class Real>
int64_t DbiasSums<Real>::local_column(const attention::Coordinate& at) const {
  const int64_t key = at.key - first_key_;
  return is_relative_ ? p_.sequences.max_seqlen_q - 1 - at.query + key : key;
}

template class DbiasSums<float>;
template class DbiasSums<double>;

}  // namespace flash_attn_ext::cpu
