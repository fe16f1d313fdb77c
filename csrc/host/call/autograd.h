// The attention call that autograd differentiates, for tensors that hold memory. What torch.func and forward mode see
// is flash_attn_ext/autograd.py, what compilers and traces see flash_attn_ext/ops.py.
#pragma once

#include "host/call/inputs.h"

namespace flash_attn_ext::host {

inline constexpr const char* kNoDoubleBackward =
    "flash_attn_ext attention is differentiable once: a second derivative (create_graph=True followed by another "
    "backward, torch.func.hessian, gradient penalties) is not implemented. Use "
    "flash_attn_ext.reference.attention_reference, or torch's scaled_dot_product_attention with SDPBackend.MATH, there";

// attention_forward, recorded when gradients are on and a tensor asks for one: out and lse then have a grad_fn. Keeps
// q, k, v, out, lse and what else was given, and nothing of size Sq x Sk of its own.
ForwardOutputs attention(const AttentionInputs& inputs);

}  // namespace flash_attn_ext::host
