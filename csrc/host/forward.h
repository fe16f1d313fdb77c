// The parts of a forward pass that calls with and without a cache share.
#pragma once

#include "attention/append.h"
#include "host/backends.h"
#include "host/call/inputs.h"

namespace flash_attn_ext::host {

// Allocates out and, if they are wanted, lse and row_max, all uninitialised.
ForwardOutputs allocate_outputs(const AttentionInputs& inputs, bool wants_lse);

// Plans the pass, allocates its workspace and runs it. `params` has everything but the outputs, which are set here.
void run_forward(const Backend& backend, attention::AppendingForwardParams& params, const ForwardOutputs& outputs);

}  // namespace flash_attn_ext::host
