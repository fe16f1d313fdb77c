#include "host/limits.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "kernels/plan/stored_scores.h"

#if FLASH_ATTN_EXT_WITH_CUDA
#include <ATen/cuda/CUDAContextLight.h>
#endif

namespace flash_attn_ext::host {
namespace {

std::optional<int64_t> workspace_bytes_asked_for() {
  const char* text = std::getenv("FLASH_ATTN_EXT_WORKSPACE_MIB");
  if (text == nullptr || *text == '\0') return std::nullopt;
  int64_t mebibytes = -1;
  const char* end = text + std::strlen(text);
  const auto [parsed, error] = std::from_chars(text, end, mebibytes);
  constexpr int64_t kMost = StoredScores::kMostBytes >> 20;
  TORCH_CHECK_VALUE(error == std::errc() && parsed == end && mebibytes >= 0 && mebibytes <= kMost,
                    "FLASH_ATTN_EXT_WORKSPACE_MIB is '", text,
                    "', expected a whole number of MiB from 0 (scores are computed again) to ", kMost,
                    "; unset it for the default");
  return mebibytes << 20;
}

}  // namespace

plan::Limits limits_of(at::Device device) {
  // Of an H200, for plans that only explain: those of tensors in CPU memory.
  plan::Limits limits = {.max_stored_bytes = int64_t{2} << 30, .l2_bytes = int64_t{60} << 20, .multiprocessors = 132};
#if FLASH_ATTN_EXT_WITH_CUDA
  if (device.is_cuda()) {
    const cudaDeviceProp* properties = at::cuda::getDeviceProperties(device.index());
    const auto total = static_cast<int64_t>(properties->totalGlobalMem);
    limits = {.max_stored_bytes = std::min(int64_t{2} << 30, total / 64),
              .l2_bytes = properties->l2CacheSize,
              .multiprocessors = properties->multiProcessorCount};
  }
#endif
  limits.max_stored_bytes = workspace_bytes_asked_for().value_or(limits.max_stored_bytes);
  return limits;
}

}  // namespace flash_attn_ext::host
