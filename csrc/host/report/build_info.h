// How this library was built.
#pragma once

#include <map>
#include <optional>
#include <string>

namespace flash_attn_ext::host {

// Facts that were fixed when the library was compiled. An absent one is nullopt.
std::map<std::string, std::optional<std::string>> build_facts();

}  // namespace flash_attn_ext::host
