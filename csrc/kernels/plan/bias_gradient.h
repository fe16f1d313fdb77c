// What the gradient of a bias is made of, for every backend's plan.
#pragma once

#include "attention/params.h"

namespace flash_attn_ext::plan {

// Whole rows of dS are all that it sums: nothing needs dS for it (attention/dscore_row_sums.h).
inline bool dbias_is_row_sums(const attention::BackwardParams& p) { return p.dbias.present() && !p.dbias.per_key; }

// It is more precise than out: a call with one is as exact in dQ and dK, whatever it is broadcast along.
inline bool has_precise_dbias(const attention::BackwardParams& p) {
  return p.dbias.present() && p.score_mod.bias.element == attention::ElementType::kFloat32;
}

// Without a sink they are dlse, whatever delta is.
inline bool dbias_reads_delta(const attention::BackwardParams& p) {
  return p.dbias.present() && (p.dbias.per_key || p.sink != nullptr);
}

}  // namespace flash_attn_ext::plan
