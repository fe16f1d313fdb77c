// The kernels' library, as this extension calls it: with PyTorch's stream, and with its errors as exceptions.
#pragma once

#include <c10/core/Device.h>

#include "library/kernels.h"

namespace flash_attn_ext::host {

// Checks that the library was built from the sources of this extension, and lends it PyTorch's threads and GEMM of
// bfloat16. Called once, before all others. Throws an error with both versions if they differ.
void connect_library();

const library::Facts& library_facts();

const library::Kernels& kernels();

// Whether the library has kernels for GPUs.
bool has_gpu_kernels();

// What the library knows of a GPU. Throws what the CUDA runtime says if it cannot be asked.
const library::Gpu& gpu_of(at::Device device);

// The current stream of the current device, if that is a GPU; nullptr on the CPU.
void* current_stream(at::Device device);

// Throws torch.AcceleratorError for an error of the CUDA runtime.
void check_launch(library::Status status);

}  // namespace flash_attn_ext::host
