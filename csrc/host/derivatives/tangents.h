// Forward mode on tensors: the one kernel that has it all, for the calls that it takes.
#pragma once

#include <array>
#include <optional>

#include "host/call/inputs.h"

namespace flash_attn_ext::host {

// What the forward pass left, and tangents of the inputs that have one.
struct TangentInputs {
  at::Tensor out;
  at::Tensor lse;
  std::optional<at::Tensor> q_tangent;
  std::optional<at::Tensor> k_tangent;
  std::optional<at::Tensor> v_tangent;
  std::optional<at::Tensor> sink_tangent;
};

// Tangents of out and lse, in their shapes and dtypes. Nothing where no kernel takes the call:
// flash_attn_ext/derivatives has PyTorch operations for those.
std::optional<std::array<at::Tensor, 2>> attention_tangents(const AttentionInputs& inputs,
                                                            const TangentInputs& tangents);

}  // namespace flash_attn_ext::host
