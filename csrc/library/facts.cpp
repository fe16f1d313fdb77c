#include "kernels/config/fast_build.h"
#include "library/kernels.h"

namespace {

#ifdef __clang__
constexpr const char* kCompiler = __VERSION__;  // begins with its name
#else
constexpr const char* kCompiler = "GCC " __VERSION__;
#endif

}  // namespace

const flash_attn_ext::library::Facts* flash_attn_ext_kernels_facts() {
  static constexpr flash_attn_ext::library::Facts kFacts = {
    .interface = FLASH_ATTN_EXT_INTERFACE,
    .version = FLASH_ATTN_EXT_VERSION,
    .compiler = kCompiler,
#if FLASH_ATTN_EXT_WITH_CUDA
    .cuda_version = FLASH_ATTN_EXT_CUDA_VERSION,
    .cuda_archs = FLASH_ATTN_EXT_CUDA_ARCHS,
    .cuda_not_built = nullptr,
#else
    .cuda_version = nullptr,
    .cuda_archs = nullptr,
    .cuda_not_built = FLASH_ATTN_EXT_NOT_BUILT,
#endif
#if FLASH_ATTN_EXT_FAST_BUILD
    .fast_build_head_dim = flash_attn_ext::kFastBuildHeadDim,
#else
    .fast_build_head_dim = 0,
#endif
  };
  return &kFacts;
}
