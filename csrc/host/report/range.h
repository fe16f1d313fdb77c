// The named range of a pass in profiles. RECORD_FUNCTION evaluates it only while a profiler records.
#pragma once

#include <cstdint>
#include <string>

namespace flash_attn_ext::host {

// The name is, for example, "flash_attn_ext forward, cpu: tiled on the CPU": the pass, the backend, and the kernels of
// a plan in words. It leaves out the workspace, whose size differs with every length, because profiles sum up ranges of
// one name.
std::string range_name(const char* pass, const char* backend, const std::string& plan);

// The number of the autograd node that a forward pass is about to get, or -1 without gradients. By it profilers join a
// forward range with its backward pass.
int64_t node_number();

}  // namespace flash_attn_ext::host
