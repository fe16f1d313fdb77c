// The kernel that lists the key tiles of a backward pass. Only the kernels that read a mask come before it.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/sm90/backward/key_stationary/arguments.h"

namespace flash_attn_ext::sm90 {

// Queues the kernel that writes args.workspace.table, and clears the counters that CTAs of the backward kernel share.
cudaError_t list_key_tiles(const BackwardArguments& args, cudaStream_t stream);

}  // namespace flash_attn_ext::sm90
