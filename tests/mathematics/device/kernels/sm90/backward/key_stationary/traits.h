// What dq_epilogue.cuh and dq_reducers.cuh read of a backward kernel: the pipeline of csrc/, and a small dQ.
#pragma once

#include <type_traits>

#include "kernels/config/key_stationary.h"
#include "kernels/sm90/backward/key_stationary/dq_stages.h"
#include "ptx/barrier.h"
#include "tile/sm90/gemm.h"

namespace flash_attn_ext::sm90 {

template <int kSlices, bool kPreSignals>
struct SmallTraits {
  static constexpr KeyStationaryConfig kConfig = {.tile = {.dq_columns = 8}, .pre_signals_dq = kPreSignals};
  static constexpr int kDqSlices = kSlices;
  static constexpr int kDqSliceFloats = tile::kWarpgroupSize * 4;
  static constexpr int kDqStageFloats = kPreSignals ? kDqSliceFloats : kSlices * kDqSliceFloats;
  using DqPipeline = std::conditional_t<kPreSignals, PreSignalledDqPipeline, WholeDqPipeline>;
};

struct KeyStationaryWorkspace {
  float* dq_sums;
  int* dq_semaphores;
};
struct KeyStationaryArguments {
  KeyStationaryWorkspace workspace;
};

inline constexpr int kDqWarps = 4;

template <class Traits>
struct KeyStationaryShared {
  float dq[kDqStages][Traits::kDqStageFloats];
  PendingSum pending[kDqReducers];
  typename Traits::DqPipeline dq_pipeline;
};

// A named barrier, whose phases are counted.
struct NamedBarrier {
  int arrived = 0;

  void sync() {
    device::step();
    const int phase = arrived++ / kDqWarps;
    while (arrived < (phase + 1) * kDqWarps) device::fibers().yield();
  }
};
inline NamedBarrier dq_warpgroup_barrier;
inline void sync_dq_warpgroup() { dq_warpgroup_barrier.sync(); }

}  // namespace flash_attn_ext::sm90
