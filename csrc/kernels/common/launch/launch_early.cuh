// Programmatic dependent launch: a kernel may start while the preceding one still runs, and waits for it before it
// accesses memory that others read or write (ptx/dependent_launch.h). The preceding kernel is that of the same call, or
// whatever was last in the stream. A call's first kernel allows its dependent launch only after its own wait, so that
// everything written before the call is visible to all of its kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "kernels/common/launch/launch_blocks.cuh"

namespace flash_attn_ext::common {

struct EarlyLaunch {
  int64_t blocks;
  int threads;
  int slices = 1;  // each with the same number of CTAs
  int shared_bytes = 0;
  bool together = false;  // a cooperative launch: all CTAs are co-resident
};

// Finds whether kernels on the current device wait for the preceding kernel. Code for compute capability 9.0 and later
// has the instruction that waits. Code for earlier devices lacks it, so its kernels must not start early. The device is
// asked only where a build has code of both kinds.
inline cudaError_t finds_code_that_waits(bool& waits) {
  constexpr int kFirst = 900;
  waits = std::min({__CUDA_ARCH_LIST__}) >= kFirst;
  if (waits || std::max({__CUDA_ARCH_LIST__}) < kFirst) return cudaSuccess;
  int device = 0;
  int major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  waits = major >= 9;
  return error;
}

template <class... Parameters>
cudaError_t launch_early(void (*kernel)(Parameters...), const EarlyLaunch& launch, cudaStream_t stream,
                         const Parameters&... arguments) {
  bool waits = false;
  const cudaError_t error = finds_code_that_waits(waits);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
  if (waits) {
    cudaLaunchAttribute& early = attributes[config.numAttrs++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  if (launch.together) {
    cudaLaunchAttribute& cooperative = attributes[config.numAttrs++];
    cooperative.id = cudaLaunchAttributeCooperative;
    cooperative.val.cooperative = 1;
  }
  config.gridDim = dim3(static_cast<unsigned>(launch.blocks), static_cast<unsigned>(launch.slices));
  config.blockDim = dim3(static_cast<unsigned>(launch.threads));
  config.dynamicSmemBytes = static_cast<size_t>(launch.shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// Does what launch_blocks does, with programmatic dependent launch.
template <class Kernel, class... Arguments>
cudaError_t launch_blocks_early(void (*kernel)(Arguments...), const Grid& grid, cudaStream_t stream,
                                const Arguments&... arguments) {
  if (grid.blocks == 0) return cudaSuccess;
  if (grid.too_large()) return cudaErrorInvalidConfiguration;
  const cudaError_t error = allow_shared_memory<Kernel>(kernel);
  if (error != cudaSuccess) return error;
  const EarlyLaunch launch = {.blocks = grid.blocks,
                              .threads = Kernel::kThreads,
                              .slices = static_cast<int>(grid.splits),
                              .shared_bytes = sizeof(typename Kernel::Shared)};
  return launch_early(kernel, launch, stream, arguments...);
}

}  // namespace flash_attn_ext::common
