// Forward mode on tensors by the one kernel that computes all of it, for the calls that this kernel takes.
#pragma once

#include <array>
#include <optional>

#include "host/call/inputs.h"

namespace flash_attn_ext::host {

// The results of the forward pass, and the tangents of those inputs that have one.
struct TangentInputs {
  at::Tensor out;
  at::Tensor lse;
  std::optional<at::Tensor> q_tangent;
  std::optional<at::Tensor> k_tangent;
  std::optional<at::Tensor> v_tangent;
  std::optional<at::Tensor> sink_tangent;
};

// The tangents of out and lse, in their shapes and dtypes. Returns nothing if no kernel takes the call:
// flash_attn_ext/derivatives has PyTorch operations for such calls.
std::optional<std::array<at::Tensor, 2>> attention_tangents(const AttentionInputs& inputs,
                                                            const TangentInputs& tangents);

}  // namespace flash_attn_ext::host
