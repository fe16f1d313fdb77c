// Launches a kernel with the shared memory that its Shared struct needs.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

namespace flash_attn_ext::common {

// Kernels that need more than the 48 KiB of shared memory that every kernel may have must opt in. They do so once per
// device, since the driver remembers it. A Kernel has one __global__ function.
template <class Kernel, class... Arguments>
cudaError_t allow_shared_memory(void (*kernel)(Arguments...)) {
  constexpr int kBytes = sizeof(typename Kernel::Shared);
  if (kBytes <= 48 * 1024) return cudaSuccess;
  static std::atomic<uint64_t> allowed_devices{0};
  int device = 0;
  const cudaError_t no_device = cudaGetDevice(&device);
  if (no_device != cudaSuccess) return no_device;
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (allowed_devices.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error == cudaSuccess) allowed_devices.fetch_or(bit, std::memory_order_relaxed);
  return error;
}

// A grid of blocks x splits CTAs.
struct Grid {
  static constexpr int64_t kMostSplits = 65535;  // CUDA's limit of gridDim.y

  int64_t blocks;
  int64_t splits;
  Grid(int64_t num_blocks, int64_t num_splits = 1) : blocks(num_blocks), splits(num_splits) {}

  bool too_large() const { return blocks > INT32_MAX || splits > kMostSplits; }
};

template <class Kernel, class... Arguments>
cudaError_t launch_blocks(void (*kernel)(Arguments...), const Grid& grid, cudaStream_t stream,
                          const Arguments&... arguments) {
  if (grid.blocks == 0) return cudaSuccess;
  if (grid.too_large()) return cudaErrorInvalidConfiguration;
  constexpr int kBytes = sizeof(typename Kernel::Shared);
  const cudaError_t error = allow_shared_memory<Kernel>(kernel);
  if (error != cudaSuccess) return error;
  const dim3 blocks(static_cast<unsigned>(grid.blocks), static_cast<unsigned>(grid.splits));
  kernel<<<blocks, Kernel::kThreads, kBytes, stream>>>(arguments...);
  return cudaGetLastError();
}

}  // namespace flash_attn_ext::common
