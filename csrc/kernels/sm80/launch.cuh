// Launches a kernel with the shared memory that its Shared struct needs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace flash_attn_ext::sm80 {

template <class Kernel, class Params>
cudaError_t launch(void (*kernel)(Params), const Params& params, int64_t num_blocks, cudaStream_t stream) {
  if (num_blocks == 0) return cudaSuccess;
  if (num_blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  constexpr int kBytes = sizeof(typename Kernel::Shared);
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(num_blocks), Kernel::kThreads, kBytes, stream>>>(params);
  return cudaGetLastError();
}

inline int64_t num_tiles(int64_t rows, int tile_rows) { return (rows + tile_rows - 1) / tile_rows; }

}  // namespace flash_attn_ext::sm80
