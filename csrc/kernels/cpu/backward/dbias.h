// The gradient of a bias that has a value for each key: dS summed over its broadcast dimensions. Each work tile of the
// backward pass (a tile of keys of one key head) adds its share. If work tiles share elements of the bias, the caller
// makes them add one after the other, in the order of their ranks.
#pragma once

#include "attention/params.h"
#include "kernels/cpu/rows/score_row.h"
#include "kernels/cpu/schedule/work_queue.h"

namespace flash_attn_ext::cpu {

template <class Real>
class DbiasSums {
 public:
  explicit DbiasSums(const attention::BackwardParams& params);

  // Whether different work tiles add to the same elements.
  static bool shared(const attention::BiasGradient& dbias) {
    return dbias.present() && !(dbias.per_batch && dbias.per_head);
  }
  // Whether add() adds to shared elements; otherwise only finish() does.
  static bool shared_by_rows(const attention::BackwardParams& p) {
    return shared(p.dbias) && p.dbias.per_query && !p.score_mod.bias.is_relative();
  }

  void start(int64_t key_head, int64_t first_key);
  void add(const ScoreRun& run, const Real* dscore);
  void finish(int64_t batch, int64_t num_keys);

 private:
  Real* target(const attention::Coordinate& at) const;
  // Whether rows of the work tile add to the same elements: of a bias without queries, or of a relative-position bias.
  bool has_local_sums() const { return p_.dbias.present() && (!p_.dbias.per_query || is_relative_); }
  int64_t local_column(const attention::Coordinate& at) const;
  int64_t num_local_rows() const { return p_.dbias.per_head ? p_.queries_per_key_head() : 1; }

  const attention::BackwardParams& p_;
  bool is_relative_ = false;
  // The sums of one work tile: for each query head, a row of the work tile's keys, or of the diagonals that have these
  // keys. They are added to the gradient when the work tile ends.
  int64_t local_columns_ = 0;
  Scratch<Real> local_;
  int64_t first_head_ = 0;
  int64_t first_key_ = 0;
};

}  // namespace flash_attn_ext::cpu
