// A pipeline of stages in shared memory, which producers fill and consumers empty in order.
#pragma once

#include "ptx/barrier.h"

namespace flash_attn_ext::tile {

// The state of a pipeline on one side: the current stage, and the parity of its phase.
template <int kStages>
struct PipelineState {
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

// The barriers of a pipeline: consumers wait for `full`, and producers for `empty`.
template <int kStagesValue>
struct PipelineBarriers {
  static constexpr int kStages = kStagesValue;
  using State = PipelineState<kStages>;

  ptx::Barrier full[kStages];
  ptx::Barrier empty[kStages];

  __device__ __forceinline__ void init(int consumers, int producers = 1) {
    for (int i = 0; i < kStages; ++i) {
      ptx::init_barrier(full[i], producers);
      ptx::init_barrier(empty[i], consumers);
    }
  }
  __device__ __forceinline__ void consumer_wait(const State& state) { ptx::wait(full[state.stage], state.parity); }
  __device__ __forceinline__ void producer_acquire(const State& state) {
    ptx::wait(empty[state.stage], state.parity ^ 1);
  }
};

}  // namespace flash_attn_ext::tile
