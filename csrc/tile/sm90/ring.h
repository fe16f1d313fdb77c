// Stages of shared memory that are filled and emptied in turn.
#pragma once

#include "ptx/barrier.h"

namespace flash_attn_ext::tile {

// Whose turn it is: the stage, and the parity of its round.
template <int kStages>
struct RingPosition {
  int stage = 0;
  int parity = 0;

  __device__ __forceinline__ void advance() {
    if constexpr (kStages == 1) {
      parity ^= 1;
    } else if constexpr (kStages == 2) {
      parity ^= stage;
      stage ^= 1;
    } else {
      stage = stage + 1 == kStages ? 0 : stage + 1;
      parity ^= stage == 0;
    }
  }
};

// The barriers of a ring: `full` is what those who read a stage wait for, `empty` what those who fill it do.
template <int kStagesValue>
struct RingBarriers {
  static constexpr int kStages = kStagesValue;
  using Position = RingPosition<kStages>;

  ptx::Barrier full[kStages];
  ptx::Barrier empty[kStages];

  __device__ __forceinline__ void init(int readers, int writers = 1) {
    for (int i = 0; i < kStages; ++i) {
      ptx::init_barrier(full[i], writers);
      ptx::init_barrier(empty[i], readers);
    }
  }
  __device__ __forceinline__ void wait_full(const Position& at) { ptx::wait(full[at.stage], at.parity); }
  __device__ __forceinline__ void wait_empty(const Position& at) { ptx::wait(empty[at.stage], at.parity ^ 1); }
};

}  // namespace flash_attn_ext::tile
