// The path to the registered operators (flash_attn_ext/ops.py), for tensors without values of their own, such as fake
// and traced ones.
#pragma once

#include <ATen/core/stack.h>

#include "host/call/inputs.h"

namespace flash_attn_ext::host {

// Whether a dispatch mode or the tracer is active, which has to see every operator call.
bool is_watched();

// Whether tensors that do not require grad may carry a derivative: under torch.func, or in forward mode.
bool is_transformed();

// Whether kernels may read the tensors of a backward pass: all of them hold memory, and no mode or tracer is active.
bool hold_memory(const AttentionInputs& inputs, const BackwardInputs& backward);

// The arguments of attention_forward's operator, in its order.
torch::jit::Stack boxed(const AttentionInputs& inputs);

// Calls the operator of the backward pass, with the arguments and results of attention_backward.
std::vector<at::Tensor> call_backward_operator(const AttentionInputs& inputs, const BackwardInputs& backward);

}  // namespace flash_attn_ext::host
