// Brings the tensors of a call into a form that kernels can read. A tensor that they cannot read in place is copied,
// and the copy is logged.
#pragma once

#include "attention/params.h"
#include "host/backends.h"
#include "host/call/inputs.h"

namespace flash_attn_ext::host {

// An uninitialised tensor with at least as many columns as `like`, whose rows every backend can read in place.
at::Tensor empty_with_aligned_rows(const at::Tensor& like);

// q, k, v, out or dout, copied when the backend cannot read it in place.
at::Tensor readable_matrix(const Backend& backend, const char* name, const at::Tensor& operand);

// An array that every kernel reads as contiguous, copied when it is not.
at::Tensor readable_array(const char* name, const at::Tensor& array);

// A table of two dimensions that every kernel reads in contiguous rows, copied when they are not.
at::Tensor readable_table(const char* name, const at::Tensor& table);

// The copies that a call made of its inputs; they must outlive it.
struct InputCopies {
  at::Tensor q, k, v;
  at::Tensor sink, cu_seqlens_q, cu_seqlens_k, intervals, blocks;
};

// Points `params` at copies of those inputs that the backend cannot read in place.
InputCopies make_readable(const Backend& backend, const AttentionInputs& inputs, attention::AttentionParams& params);

// The same for everything but k and v, which a call with a cache writes before it reads them.
InputCopies make_readable_except_keys(const Backend& backend, const AttentionInputs& inputs,
                                      attention::AttentionParams& params);

}  // namespace flash_attn_ext::host
