// Which code the library has for a GPU. Without any a launch fails, whatever the call.
#pragma once

#include <algorithm>
#include <string_view>

namespace flash_attn_ext::library {

// "machine code", "PTX", which the driver compiles when it is loaded, or nullptr. archs: what the library was compiled
// for, such as "8.0;9.0a+PTX"; an entry of another form counts as none. Machine code runs on GPUs of its major version
// whose minor version is the same or later. Kernels for 9.0a run on 9.0 only, and the portable kernels compiled with
// them on every 9.x. PTX is for every later GPU; before 9.0 it is that of 8.0 (build_support/archs.py).
constexpr const char* code_for(int major, int minor, std::string_view archs) {
  const char* found = nullptr;
  while (!archs.empty()) {
    const std::string_view arch = archs.substr(0, archs.find(';'));
    archs.remove_prefix(std::min(archs.size(), arch.size() + 1));
    const size_t dot = arch.find('.');
    if (dot == 0 || dot >= arch.size() - 1) continue;
    int arch_major = 0;
    for (const char digit : arch.substr(0, dot)) arch_major = 10 * arch_major + (digit - '0');
    const int arch_minor = arch[dot + 1] - '0';
    if (major == arch_major && minor >= arch_minor) return "machine code";
    const bool reaches = arch_major == 8 ? major >= 8 : major > arch_major;
    if (reaches && arch.ends_with("+PTX")) found = "PTX";
  }
  return found;
}

}  // namespace flash_attn_ext::library
