// PyTorch's threads and GEMM of bfloat16, for the CPU kernels.
#pragma once

#include "kernels/cpu/services.h"

namespace flash_attn_ext::host {

cpu::Services services_of_torch();

}  // namespace flash_attn_ext::host
