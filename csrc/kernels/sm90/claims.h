// Counters by which the blocks of a launch claim their work. Each is 0 while no launch uses it: the block that makes
// the last claim resets it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace flash_attn_ext::sm90 {

// A counter that no launch in flight uses. Launches that are captured into a graph, which may be replayed at any time,
// have their own for good; the others take turns at many more than can be queued. cudaErrorMemoryAllocation when the
// captured ones have used up theirs.
cudaError_t next_claim_counter(uint32_t*& counter, cudaStream_t stream);

}  // namespace flash_attn_ext::sm90
