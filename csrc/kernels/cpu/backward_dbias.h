// The gradient of a bias that has a value for each key: dS summed over its broadcast dimensions. Each item of the
// backward pass (a tile of keys of one key head) adds its part. Where items share elements of the bias they do so one
// after the other, which the caller sees to.
#pragma once

#include "attention/params.h"
#include "kernels/cpu/rows/score_row.h"
#include "kernels/cpu/scratch.h"

namespace flash_attn_ext::cpu {

template <class Real>
class DbiasSums {
 public:
  explicit DbiasSums(const attention::BackwardParams& params);

  // Whether different items add to the same elements.
  static bool shared(const attention::BiasGradient& dbias) {
    return dbias.present() && !(dbias.per_batch && dbias.per_head);
  }
  // Whether add() does so; else only finish() does.
  static bool shared_by_rows(const attention::BiasGradient& dbias) { return shared(dbias) && dbias.per_query; }

  void start(int64_t key_head, int64_t first_key);
  void add(const ScoreRun& run, const Real* dscore);
  void finish(int64_t batch, int64_t num_keys);

 private:
  Real* target(const attention::Coordinate& at) const;
  int64_t num_local_rows() const { return p_.dbias.per_head ? p_.queries_per_key_head() : 1; }

  const attention::BackwardParams& p_;
  // A bias that has no dimension of queries gets an item's sum over them at its end: a row of the item's keys for each
  // query head.
  Scratch<Real> local_;
  int64_t first_head_ = 0;
  int64_t first_key_ = 0;
};

}  // namespace flash_attn_ext::cpu
