// Which instantiation of a kernel a call takes.
#pragma once

#include "kernels/dispatch.h"
#include "kernels/sm80/score_tile.cuh"

namespace flash_attn_ext::sm80 {

template <Score kScore>
using ScoreTag = std::integral_constant<Score, kScore>;

// Sequences of so few queries fill the smaller tiles of the Extended kernels, which can do everything.
inline constexpr int64_t kFewQueries = 64;

// Calls function(score).
template <class Function>
cudaError_t with_score(const attention::AttentionParams& p, Function&& function) {
  const bool plain = has_plain_scores(p) && p.sequences.max_seqlen_q > kFewQueries;
  return plain ? function(ScoreTag<Score::kPlain>{}) : function(ScoreTag<Score::kExtended>{});
}

}  // namespace flash_attn_ext::sm80
