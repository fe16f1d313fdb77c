// The forward and backward pass on tensors: allocate, guard, choose the backend, call it.
#pragma once

#include "host/call/inputs.h"

namespace flash_attn_ext::host {

// Without `wants_lse`, the outputs have no LSE.
ForwardOutputs attention_forward(const AttentionInputs& inputs, bool wants_lse);

// Returns dq, dk, dv, dbias, dalibi_slopes and dsink; those that output_mask does not ask for are undefined.
std::vector<at::Tensor> attention_backward(const AttentionInputs& inputs, const BackwardInputs& backward);

// rowsum(dout * out) - dlse: (B, H, S) for (B, H, S, D), (H, T) for packed (T, H, D); accumulate type.
at::Tensor compute_delta(const at::Tensor& out, const at::Tensor& dout, const std::optional<at::Tensor>& dlse);

}  // namespace flash_attn_ext::host
