// The attention call that autograd differentiates, for tensors that hold memory. torch.func and forward mode use
// flash_attn_ext/autograd.py instead, and compilers and traces use flash_attn_ext/ops.py.
#pragma once

#include "host/call/inputs.h"

namespace flash_attn_ext::host {

// attention_forward, which autograd records in grad mode if an input requires grad. Then out and lse have a grad_fn,
// and there always is an lse. It saves q, k, v, out, lse and the other inputs, and nothing of size Sq x Sk of its own.
ForwardOutputs attention(const AttentionInputs& inputs, bool wants_lse);

// How many backward passes of these calls this process has run.
int64_t num_recorded_backward_passes();

}  // namespace flash_attn_ext::host
