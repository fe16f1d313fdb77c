// The arguments that the kernels of one backward pass share, beyond those that every backend gets.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "kernels/common/sums/alibi_partials.h"
#include "kernels/common/sums/dq_splits.h"
#include "kernels/plan/materialised_scores.h"

namespace flash_attn_ext::sm80 {

struct BackwardParams : attention::BackwardParams {
  bool delta_is_pending = false;  // the dQ or the fused kernel computes delta from out and dout

  // The pairs of a launch, each a batch entry and a key head. They are numbered head-major, key head * batch + batch
  // entry, so that a launch may hold all batch entries of a head.
  int64_t first_pair = 0;
  int64_t num_pairs = 0;

  MaterialisedScores materialised;
  common::DqSplits dq_splits;         // where present, the dQ kernel writes its splits here
  uint8_t* dq_nan_flags = nullptr;    // one per warp of the dQ kernel: whether its rows have a NaN
  uint8_t* dkdv_nan_flags = nullptr;  // the same for the dK/dV kernel
  common::AlibiPartials alibi_partials;
};

}  // namespace flash_attn_ext::sm80
