// Which scores of an iteration are unmasked by the boolean mask, for a thread's keys and queries.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/schedule/mask_iterations.h"
#include "ptx/pin.h"

namespace flash_attn_ext::sm90 {

// A bit for each score that a thread holds. It is read an iteration ahead, while GEMMs are in flight.
struct UnmaskedScores {
  static constexpr uint32_t kAll = 0xFFFFFFFFu;

  uint32_t bits;

  // thread: its number among those that compute scores.
  __device__ __forceinline__ void read(const MaskIterations& mask, int tile, int thread) {
    bits = tile == MaskIterations::Entry::kNothingMasked
               ? kAll
               : mask.words[int64_t{tile} * MaskIterations::kThreads + thread];
  }

  // Masked scores become -inf.
  template <class Scores>
  __device__ __forceinline__ void hide(Scores& scores) const {
    static_assert(Scores::kThreadRows * Scores::kColumnTiles * 2 == 32);
    if (__all_sync(0xFFFFFFFFu, bits == kAll)) return;
    const uint32_t unmasked = ptx::pin(bits);
    // The loop has the order of the bits: ptxas then moves seven of them into predicates at a time.
#pragma unroll
    for (int bit = 0; bit < 32; ++bit) {
      float& score = scores.at(bit / 8 % 2, bit % 8, bit / 16);
      score = (unmasked & 1u << bit) != 0 ? score : -INFINITY;
    }
  }
};

}  // namespace flash_attn_ext::sm90
