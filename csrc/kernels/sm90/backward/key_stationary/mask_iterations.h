// Which iterations a mask leaves to a backward pass.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/sm90/backward/key_stationary/arguments.h"

namespace flash_attn_ext::sm90 {

// Queues the kernels that write args.mask. It queues nothing where there is no mask.
cudaError_t list_mask_iterations(const BackwardArguments& args, cudaStream_t stream);

}  // namespace flash_attn_ext::sm90
