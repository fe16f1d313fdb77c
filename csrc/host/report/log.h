// Messages that a user may want but does not need. They go to Python's logger "flash_attn_ext".
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace flash_attn_ext::host {

// Is called for each tensor that is copied because kernels cannot read it in place; `needed` says what they can read.
// The call may come from any thread, without the GIL.
using CopyLog = std::function<void(const char* name, const at::Tensor& tensor, const char* needed)>;

void set_copy_log(CopyLog log);
void log_copy(const char* name, const at::Tensor& tensor, const char* needed);

}  // namespace flash_attn_ext::host
