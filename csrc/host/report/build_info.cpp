#include "host/report/build_info.h"

#include <torch/version.h>

#include "host/library/library.h"

namespace flash_attn_ext::host {

std::map<std::string, std::optional<std::string>> build_facts() {
  const library::Facts& facts = library_facts();
  const auto text = [](const char* given) { return given ? std::optional<std::string>(given) : std::nullopt; };
  std::optional<std::string> fast_build;
  if (facts.fast_build_head_dim > 0) {
    fast_build = "bfloat16, head dims up to " + std::to_string(facts.fast_build_head_dim);
  }
  return {{"version", facts.version},
          {"compiler", facts.compiler},
          {"torch_version", TORCH_VERSION},
          {"cuda_version", text(facts.cuda_version)},
          {"cuda_archs", text(facts.cuda_archs)},
          {"cuda_not_built", text(facts.cuda_not_built)},
          {"fast_build", fast_build}};
}

}  // namespace flash_attn_ext::host
