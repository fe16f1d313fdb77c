#include "host/report/build_info.h"

#include <torch/version.h>

#include "host/library/library.h"

namespace flash_attn_ext::host {

std::map<std::string, std::optional<std::string>> build_facts() {
  const library::Facts& facts = library_facts();
  const auto text = [](const char* given) { return given ? std::optional<std::string>(given) : std::nullopt; };
  return {{"version", facts.version},
          {"compiler", facts.compiler},
          {"torch_version", TORCH_VERSION},
          {"cuda_version", text(facts.cuda_version)},
          {"cuda_archs", text(facts.cuda_archs)},
          {"cuda_not_built", text(facts.cuda_not_built)},
          {"fast_build", text(facts.fast_build)}};
}

}  // namespace flash_attn_ext::host
