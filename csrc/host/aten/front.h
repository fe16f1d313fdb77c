// Kernels of C++ before those of Python that flash_attn_ext/integrations/torch_backend puts in the place of PyTorch's
// attention operators: they run the calls that need nothing but q, k, v, causality and a scale, without a step through
// Python, and hand all others on.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace flash_attn_ext::host {

// In force until remove() or its end. What was there before is what calls are handed on to.
class OperatorFront {
 public:
  // Raises for an operator that has no kernel here, one of operators_with_front().
  OperatorFront(const std::string& operator_name, const std::string& dispatch_key);
  void remove() { registration_.reset(); }

 private:
  std::unique_ptr<c10::RegistrationHandleRAII> registration_;
};

// Names without "aten::".
std::vector<std::string> operators_with_front();

// How many forward and backward passes all fronts have run in this process.
std::array<int64_t, 2> passes_of_fronts();

}  // namespace flash_attn_ext::host
