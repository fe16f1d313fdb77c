// What a user may want to know and need not: goes to Python's logger "flash_attn_ext".
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace flash_attn_ext::host {

// Hears of a tensor that is copied because kernels cannot read it in place; `needed` says what they can read. Called on
// any thread, without the GIL.
using CopyLog = std::function<void(const char* name, const at::Tensor& tensor, const char* needed)>;

void set_copy_log(CopyLog log);
void log_copy(const char* name, const at::Tensor& tensor, const char* needed);

}  // namespace flash_attn_ext::host
