// The way to the registered operators (flash_attn_ext/ops.py) for tensors that only stand for something.
#pragma once

#include <ATen/core/stack.h>

#include "host/call/inputs.h"

namespace flash_attn_ext::host {

// Whether a dispatch mode or the tracer has to see what is called.
bool is_watched();

// Whether tensors that do not require grad may carry a derivative: under torch.func, or in forward mode.
bool is_transformed();

// Whether a kernel may read what the backward pass gets: memory behind each tensor, while nothing watches.
bool hold_memory(const AttentionInputs& inputs, const BackwardInputs& backward);

// The arguments of attention_forward's operator, in its order.
torch::jit::Stack boxed(const AttentionInputs& inputs);

// As attention_backward.
std::vector<at::Tensor> call_backward_operator(const AttentionInputs& inputs, const BackwardInputs& backward);

}  // namespace flash_attn_ext::host
