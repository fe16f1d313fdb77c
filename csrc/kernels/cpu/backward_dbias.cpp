#include "kernels/cpu/backward_dbias.h"

#include <algorithm>

#include "kernels/config/cpu.h"
#include "kernels/cpu/rows/row_ops.h"

namespace flash_attn_ext::cpu {

template <class Real>
DbiasSums<Real>::DbiasSums(const attention::BackwardParams& params) : p_(params) {
  if (p_.dbias.present() && !p_.dbias.per_query) local_.reserve(num_local_rows() * kStreamedRows);
}

template <class Real>
Real* DbiasSums<Real>::target(const attention::Coordinate& at) const {
  const attention::BiasGradient& g = p_.dbias;
  return static_cast<Real*>(g.data) + at.batch * g.batch_stride + at.head * g.head_stride + at.query * g.query_stride +
         at.key * g.key_stride;
}

template <class Real>
void DbiasSums<Real>::start(int64_t key_head, int64_t first_key) {
  if (!p_.dbias.present() || p_.dbias.per_query) return;
  first_head_ = key_head * p_.queries_per_key_head();
  first_key_ = first_key;
  std::fill_n(local_.data(), num_local_rows() * kStreamedRows, Real(0));
}

template <class Real>
void DbiasSums<Real>::add(const ScoreRun& run, const Real* dscore) {
  if (!p_.dbias.present()) return;
  if (p_.dbias.per_query) return add_row(target(run.first), dscore, run.count);
  const int64_t row = p_.dbias.per_head ? run.first.head - first_head_ : 0;
  add_row(local_.data() + row * kStreamedRows + run.first.key - first_key_, dscore, run.count);
}

template <class Real>
void DbiasSums<Real>::finish(int64_t batch, int64_t num_keys) {
  if (!p_.dbias.present() || p_.dbias.per_query) return;
  for (int64_t row = 0; row < num_local_rows(); ++row) {
    Real* sums = target({batch, first_head_ + row, 0, first_key_});
    add_row(sums, local_.data() + row * kStreamedRows, num_keys);
  }
}

template class DbiasSums<float>;
template class DbiasSums<double>;

}  // namespace flash_attn_ext::cpu
