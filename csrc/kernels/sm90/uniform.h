// Warp-uniform values.
#pragma once

namespace flash_attn_ext::sm90 {

// Broadcasts a warp-uniform value, so that ptxas knows that it is uniform. Loops over it keep pipeline stages, and with
// them the wgmma descriptors, in uniform registers.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xFFFFFFFFu, x, 0); }

}  // namespace flash_attn_ext::sm90
