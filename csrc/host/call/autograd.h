// The attention call that autograd differentiates, for tensors that hold memory. What torch.func and forward mode see
// is flash_attn_ext/autograd.py, what compilers and traces see flash_attn_ext/ops.py.
#pragma once

#include "host/call/inputs.h"

namespace flash_attn_ext::host {

// attention_forward, recorded when gradients are on and a tensor asks for one: out and lse, which there then always is,
// have a grad_fn. Keeps q, k, v, out, lse and what else was given, and nothing of size Sq x Sk of its own.
ForwardOutputs attention(const AttentionInputs& inputs, bool wants_lse);

// How many backward passes of these calls this process has run.
int64_t num_recorded_backward_passes();

}  // namespace flash_attn_ext::host
