// Counters from which the persistent CTAs of a launch fetch work tiles. Each is 0 while no launch uses it: the CTA that
// fetches last resets it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace flash_attn_ext::sm90 {

// A counter that no launch in flight uses. Launches that are captured into a graph, which may be replayed at any time,
// keep theirs for good. The others reuse counters in rotation, of which there are many more than launches can be
// queued. It returns cudaErrorMemoryAllocation when captured launches have used theirs up.
cudaError_t next_work_counter(uint32_t*& counter, cudaStream_t stream);

}  // namespace flash_attn_ext::sm90
