// The named range of a pass in profiles: what RECORD_FUNCTION gets, which asks for it only while something records.
#pragma once

#include <cstdint>
#include <string>

namespace flash_attn_ext::host {

// "flash_attn_ext forward, cpu: tiled on the CPU": the pass, the backend, and of a plan in words its kernels. Without
// its workspace, which has another size at every length: profiles sum up ranges of one name.
std::string range_name(const char* pass, const char* backend, const std::string& plan);

// Of the autograd node that a forward pass is about to get, -1 without gradients: profilers join a forward range with
// its backward pass by it.
int64_t node_number();

}  // namespace flash_attn_ext::host
