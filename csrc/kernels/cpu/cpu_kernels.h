// The CPU backend's stages. Each runs on all threads and returns when its outputs are written.
#pragma once

#include "attention/append.h"
#include "attention/params.h"

namespace flash_attn_ext::cpu {

// New keys and values go into the cache, rotated where that is asked for; so is q.
void append_kv(const attention::AppendParams& params);

// O and LSE. Keys are divided in parts of keys_per_part, which threads share; 0: they are not.
void forward(const attention::ForwardParams& params, int64_t keys_per_part);

// delta = rowsum(dout * out) - dlse.
void delta(const attention::DeltaParams& params);

// The same from P and dP instead of out: sum over keys of P dP, minus dlse. For 16-bit tensors, whose rounded out
// leaves an error in delta that does not cancel where dS should.
void backward_delta(const attention::BackwardParams& params);

// The gradient of a bias that is broadcast along keys. params.delta is rowsum(dout * out); dlse is taken off it on the
// way.
void dbias_from_rows(const attention::BackwardParams& params);

// dQ, dK, dV and the gradients of ALiBi slopes and a bias that has a value for each key, as many of them as are wanted.
void backward(const attention::BackwardParams& params);

// The sinks' gradient.
void backward_dsink(const attention::BackwardParams& params);

}  // namespace flash_attn_ext::cpu
