// What a mask leaves to a backward pass.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/sm90/backward/arguments.h"

namespace flash_attn_ext::sm90 {

// Queues the kernels that write args.mask. Nothing where there is no mask.
cudaError_t list_mask_visits(const BackwardArguments& args, cudaStream_t stream);

}  // namespace flash_attn_ext::sm90
