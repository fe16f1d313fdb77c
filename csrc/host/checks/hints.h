// Hints that errors add about arguments that would fit in another form. Each is empty, or begins with "; ".
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "host/call/inputs.h"
#include "host/checks/sequence_lengths.h"

namespace flash_attn_ext::host {

// For head counts that do not match: says if they would with heads and sequence exchanged.
std::string hint_at_layout(const AttentionInputs& in);

// The same for a tensor that has a value for each head.
std::string hint_at_layout(const AttentionInputs& in, const at::Tensor& of_heads);

// For a bias or mask of four dimensions that seems to come from one without a dimension of heads, or of heads and
// queries.
std::string hint_at_dimensions(const char* name, const at::Tensor& table, const AttentionInputs& in,
                               const SequenceLengths& longest);

// What to do about a bias, or a mask, of a dtype that it cannot have. Flags of 0 and 1 must not be added to scores.
const char* hint_at_mask(at::ScalarType dtype_of_bias);
const char* hint_at_bias(at::ScalarType dtype_of_mask);

}  // namespace flash_attn_ext::host
