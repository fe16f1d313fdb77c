// Which scores of a visit a boolean mask lets a thread's keys and queries have.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/plan/mask_visits.h"
#include "ptx/pin.h"

namespace flash_attn_ext::sm90 {

// A bit for each score that a thread holds. They are read a visit ahead, while products are in flight.
struct AttendedScores {
  static constexpr uint32_t kAll = 0xFFFFFFFFu;

  uint32_t bits;

  // thread: of those that compute scores.
  __device__ __forceinline__ void read(const MaskVisits& mask, int tile, int thread) {
    bits = tile == MaskVisits::Entry::kNothingMasked ? kAll : mask.words[int64_t{tile} * MaskVisits::kThreads + thread];
  }

  // What the mask hides becomes -inf.
  template <class Scores>
  __device__ __forceinline__ void hide(Scores& scores) const {
    static_assert(Scores::kThreadRows * Scores::kColumnTiles * 2 == 32);
    if (__all_sync(0xFFFFFFFFu, bits == kAll)) return;
    const uint32_t attended = ptx::pin(bits);
    // In the order of bits, of which ptxas then moves seven into predicates at a time.
#pragma unroll
    for (int bit = 0; bit < 32; ++bit) {
      float& score = scores.at(bit / 8 % 2, bit % 8, bit / 16);
      score = (attended & 1u << bit) != 0 ? score : -INFINITY;
    }
  }
};

}  // namespace flash_attn_ext::sm90
