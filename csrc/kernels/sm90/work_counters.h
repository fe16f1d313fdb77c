// Counters from which the persistent CTAs of a launch fetch work tiles. Each is 0 while no launch uses it: the CTA that
// fetches last resets it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace flash_attn_ext::sm90 {

// A counter that no launch in flight uses. A launch that is captured into a graph, which may be replayed at any time,
// keeps its counter. The others reuse counters in rotation, and there are many more of these than launches that can be
// queued. Returns cudaErrorMemoryAllocation when no counter is left for a captured launch.
cudaError_t next_work_counter(uint32_t*& counter, cudaStream_t stream);

}  // namespace flash_attn_ext::sm90
