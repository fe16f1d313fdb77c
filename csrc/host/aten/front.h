// C++ kernels in front of the Python kernels by which flash_attn_ext/integrations/torch_backend replaces PyTorch's
// attention operators. They run calls that need nothing but q, k, v, causality and a scale, without entering Python,
// and pass all others on.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace flash_attn_ext::host {

// A kernel that is registered until remove() or its destruction. It passes calls on to the kernel that was there
// before.
class OperatorFront {
 public:
  // Throws for an operator that is not one of operators_with_front().
  OperatorFront(const std::string& operator_name, const std::string& dispatch_key);
  void remove() { registration_.reset(); }

 private:
  std::unique_ptr<c10::RegistrationHandleRAII> registration_;
};

// The operators' names, without "aten::".
std::vector<std::string> operators_with_front();

// How many forward and backward passes all fronts have run in this process.
std::array<int64_t, 2> passes_of_fronts();

}  // namespace flash_attn_ext::host
