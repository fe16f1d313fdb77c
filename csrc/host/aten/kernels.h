// The calls of PyTorch's attention operators that front.h runs, each as its schema has them.
#pragma once

#include <ATen/core/stack.h>

#include <array>
#include <optional>

namespace flash_attn_ext::host {

using Results = torch::jit::Stack;

// A call's arguments, in its schema's order, to its results; nothing where the call needs more than there is here.
using OperatorKernelOfOurs = std::optional<Results> (*)(c10::ArrayRef<c10::IValue> arguments);

struct FrontKernel {
  const char* operator_name;
  bool is_backward;
  OperatorKernelOfOurs run;
};

const std::array<FrontKernel, 9>& front_kernels();

}  // namespace flash_attn_ext::host
