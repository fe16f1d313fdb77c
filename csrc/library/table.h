// How the table of kernels is filled.
#pragma once

#include "library/kernels.h"

namespace flash_attn_ext::library {

// The rows of Kernels::backends.
enum BackendRow { kSm90, kSm80, kCpu };
static_assert(kCpu + 1 == kNumBackends);

// Sets what a build with CUDA has: table.gpu, and the functions of the GPU backends that are built.
void add_gpu_kernels(Kernels& table);

}  // namespace flash_attn_ext::library
