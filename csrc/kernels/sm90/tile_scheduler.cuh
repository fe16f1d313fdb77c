// Tile schedulers of persistent CTAs. A dynamic one fetches work tiles from a counter that the CTAs of a launch share.
// A static one knows them in advance.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ptx/barrier.h"

namespace flash_attn_ext::sm90 {

// A counter that no launch in flight uses, for forward kernels. It is 0 while no launch uses it: the CTA that fetches
// last resets it. Counters of backward kernels lie in the workspace, and are cleared there. A launch that is captured
// into a graph, which may be replayed at any time, keeps its counter. The others reuse counters in rotation, and there
// are many more of these than launches that can be queued. Returns cudaErrorMemoryAllocation when no counter is left
// for a captured launch.
cudaError_t next_work_counter(uint32_t*& counter, cudaStream_t stream);

// Fetches the index of a CTA's next work tile. Its first one has the index of the CTA.
__device__ __forceinline__ uint32_t fetch_work_tile(uint32_t* work_counter) {
  return gridDim.x + atomicAdd(work_counter, 1u);
}

// The same, where the CTA that fetches last resets the counter for the next launch.
__device__ __forceinline__ uint32_t fetch_work_tile(uint32_t* work_counter, uint32_t num_work_tiles) {
  const uint32_t count = atomicAdd(work_counter, 1u);
  if (count + 1 == num_work_tiles) *work_counter = 0;
  return gridDim.x + count;
}

// Calls function(index) for each of a CTA's work tiles, where all cost the same: every gridDim.x-th one.
template <class Function>
__device__ __forceinline__ void for_each_static_work_tile(uint32_t num_work_tiles, Function&& function) {
  const auto count = static_cast<int>(num_work_tiles);
#pragma unroll 1
  for (int index = static_cast<int>(blockIdx.x); index < count; index += static_cast<int>(gridDim.x)) {
    function(index);
  }
}

// Publishes the sentinel: there are no more work tiles. Work has a `batch` and kEnd.
template <class Work, class Pipeline>
__device__ __forceinline__ void publish_end(Work* stages, Pipeline& pipeline, const typename Pipeline::State& state) {
  pipeline.producer_acquire(state);
  stages[state.stage].batch = Work::kEnd;
  ptx::arrive(pipeline.full[state.stage]);
}

}  // namespace flash_attn_ext::sm90
