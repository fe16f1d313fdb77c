// Values that a warp has in common.
#pragma once

namespace flash_attn_ext::sm90 {

// What all threads of a warp have alike, so that ptxas knows it too: loops over it leave stages, and with them the
// products' descriptors, in uniform registers.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xFFFFFFFFu, x, 0); }

}  // namespace flash_attn_ext::sm90
