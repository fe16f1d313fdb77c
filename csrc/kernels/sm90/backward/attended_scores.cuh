// Which scores of a visit a boolean mask lets a thread's keys and queries have.
#pragma once

#include <cstdint>

#include "kernels/plan/mask_visits.h"
#include "kernels/score/score_tile.cuh"
#include "ptx/pin.h"
#include "tile/accumulator.h"

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
    for_each_element<Scores>([&](int r, int, int j, int e, int) {
      scores.at(r, j, e) = (attended & 1u << (16 * r + 2 * j + e)) != 0 ? scores.at(r, j, e) : -INFINITY;
    });
  }
};

}  // namespace flash_attn_ext::sm90
