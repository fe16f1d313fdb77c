#include "host/report/build_info.h"

#include <torch/version.h>

namespace flash_attn_ext::host {
namespace {

#ifdef __clang__
constexpr const char* kCompiler = __VERSION__;  // begins with its name
#else
constexpr const char* kCompiler = "GCC " __VERSION__;
#endif

}  // namespace

std::map<std::string, std::optional<std::string>> build_facts() {
  std::map<std::string, std::optional<std::string>> facts;
  facts["compiler"] = kCompiler;
  facts["torch_version"] = TORCH_VERSION;
#if FLASH_ATTN_EXT_WITH_CUDA
  facts["cuda_version"] = FLASH_ATTN_EXT_CUDA_VERSION;
  facts["cuda_archs"] = FLASH_ATTN_EXT_CUDA_ARCHS;
  facts["cuda_not_built"] = std::nullopt;
#else
  facts["cuda_version"] = std::nullopt;
  facts["cuda_archs"] = std::nullopt;
  facts["cuda_not_built"] = FLASH_ATTN_EXT_NOT_BUILT;
#endif
  return facts;
}

}  // namespace flash_attn_ext::host
