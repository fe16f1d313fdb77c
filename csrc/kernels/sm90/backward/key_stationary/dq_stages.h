// The pipeline for partial dQ on its way to memory: the dQ warpgroup fills its stages, and two reducers empty them.
#pragma once

#include "tile/sm90/pipeline.h"

namespace flash_attn_ext::sm90 {

inline constexpr int kDqStages = 2;
inline constexpr int kDqReducers = 2;

// An iteration whose partial dQ a reducer is to add to memory.
struct PendingSum {
  int accumulator;  // its index in the workspace; kEnd: there are no more iterations
  int rank;
  static constexpr int kEnd = -1;
};

// A stage holds dQ of an iteration, and belongs to one of the reducers.
struct WholeDqPipeline : tile::PipelineBarriers<kDqStages> {
  __device__ __forceinline__ void init(int warps) { PipelineBarriers::init(1, warps); }
};

// A stage holds a slice of columns of it.
struct PreSignalledDqPipeline : tile::PipelineBarriers<kDqStages> {
  ptx::Barrier pre_signalled[kDqReducers];
  ptx::Barrier fetched;  // the accumulator that a last contributor reads

  __device__ __forceinline__ void init(int warps) {
    PipelineBarriers::init(1, warps);
    for (auto& barrier : pre_signalled) ptx::init_barrier(barrier, warps);
    ptx::init_barrier(fetched, 1);
  }
};

}  // namespace flash_attn_ext::sm90
