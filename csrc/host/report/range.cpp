#include "host/report/range.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>

namespace flash_attn_ext::host {

std::string range_name(const char* pass, const char* backend, const std::string& plan) {
  const std::string kernels = plan.substr(0, plan.find(';'));  // delta, dBias and workspace come after it
  return std::string("flash_attn_ext ") + pass + ", " + backend + ": " + kernels;
}

int64_t node_number() {
  return at::GradMode::is_enabled() ? static_cast<int64_t>(at::sequence_number::peek()) : int64_t{-1};
}

}  // namespace flash_attn_ext::host
