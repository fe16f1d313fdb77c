// How the table of kernels is filled.
#pragma once

#include <cstring>
#include <stdexcept>

#include "library/kernels.h"

namespace flash_attn_ext::library {

// The row of a backend, built or not.
inline Backend& row_of(const char* name, Kernels& table) {
  for (Backend& backend : table.backends) {
    if (std::strcmp(backend.name, name) == 0) return backend;
  }
  throw std::logic_error("no such backend");
}

// Sets what a build with CUDA has: table.gpu, and the functions of the GPU backends that are built.
void add_gpu_kernels(Kernels& table);

}  // namespace flash_attn_ext::library
