// Reads what is added to a run of scores (ALiBi, bias, mask) and which of them dropout keeps.
#pragma once

#include <cstdint>

#include "attention/params.h"

namespace flash_attn_ext::cpu {

// The scores of one query and neighbouring keys.
struct ScoreRun {
  attention::Coordinate first;
  int64_t count;
};

// ALiBi + bias of the run's scores, or -inf where the mask is False, or no interval or block has the key. The result is
// in scratch, or in the bias itself.
template <class Real>
const Real* load_added(const attention::ScoreMod& score_mod, const ScoreRun& run, const attention::Sequence& sequence,
                       int64_t diagonal, Real* scratch);

// Sum over the run of dscore * d score / d slope.
template <class Real>
double alibi_slope_gradient(const ScoreRun& run, int64_t diagonal, const Real* dscore);

// keep[i] = 1 / (1 - p) where dropout keeps the run's i-th score, else 0.
template <class Real>
void load_keep(const attention::Dropout& dropout, const ScoreRun& run, Real* keep);

}  // namespace flash_attn_ext::cpu
