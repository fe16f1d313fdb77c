// How the gradient of a bias is computed, for every backend's plan.
#pragma once

#include "attention/params.h"

namespace flash_attn_ext::plan {

// Whether dBias sums whole rows of dS only. It then needs no dS (attention/dscore_row_sums.h).
inline bool dbias_is_row_sums(const attention::BackwardParams& p) { return p.dbias.present() && !p.dbias.per_key; }

// Whether dBias is more precise than out. dQ and dK of such a call are as exact, whatever dimensions the bias is
// broadcast along.
inline bool has_precise_dbias(const attention::BackwardParams& p) {
  return p.dbias.present() && p.score_mod.bias.element == attention::ElementType::kFloat32;
}

// Whether dBias depends on delta. Without a sink, sums of whole rows are dlse, whatever delta is.
inline bool dbias_reads_delta(const attention::BackwardParams& p) {
  return p.dbias.present() && (p.dbias.per_key || p.sink != nullptr);
}

}  // namespace flash_attn_ext::plan
