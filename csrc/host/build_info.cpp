#include "host/build_info.h"

#include <torch/version.h>

namespace flash_attn_ext::host {

std::map<std::string, std::optional<std::string>> build_facts() {
  std::map<std::string, std::optional<std::string>> facts;
  facts["compiler"] = __VERSION__;
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
