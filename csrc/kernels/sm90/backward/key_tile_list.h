// The first kernel of a backward pass.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/sm90/backward/arguments.h"

namespace flash_attn_ext::sm90 {

// Queues the kernel that writes args.workspace.table, and zeros where the blocks of the backward kernel meet.
cudaError_t list_key_tiles(const BackwardArguments& args, cudaStream_t stream);

}  // namespace flash_attn_ext::sm90
