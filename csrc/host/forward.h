// The parts of a forward pass that calls with and without a cache share.
#pragma once

#include "attention/append.h"
#include "host/backends.h"
#include "host/call/inputs.h"

namespace flash_attn_ext::host {

// out and, where it is wanted, lse, uninitialised.
ForwardOutputs allocate_outputs(const AttentionInputs& inputs, bool wants_lse);

// Plans the pass, allocates its workspace and runs it, into the outputs. `params` needs all but these.
void run_forward(const Backend& backend, attention::AppendingForwardParams& params, const ForwardOutputs& outputs);

}  // namespace flash_attn_ext::host
