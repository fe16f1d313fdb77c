// The calls of PyTorch's attention operators that front.h runs, with the arguments and results of their schemas.
#pragma once

#include <ATen/core/stack.h>

#include <array>
#include <optional>

namespace flash_attn_ext::host {

using Results = torch::jit::Stack;

// Maps a call's arguments, in its schema's order, to its results; to nothing if the call needs more than there is here.
using OperatorKernelOfOurs = std::optional<Results> (*)(c10::ArrayRef<c10::IValue> arguments);

struct FrontKernel {
  const char* operator_name;
  bool is_backward;
  OperatorKernelOfOurs run;
};

const std::array<FrontKernel, 9>& front_kernels();

}  // namespace flash_attn_ext::host
