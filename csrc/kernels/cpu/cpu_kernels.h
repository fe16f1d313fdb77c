// The CPU backend's stages. Each runs on all threads and returns when its outputs are written.
#pragma once

#include "attention/append.h"
#include "attention/params.h"

namespace flash_attn_ext::cpu {

// Appends new keys and values to the cache. If there are rotary tables, it rotates the new keys and q.
void append_kv(const attention::AppendParams& params);

// Computes O and LSE. With split-KV, threads share splits of keys_per_split keys; 0: no split-KV.
void forward(const attention::ForwardParams& params, int64_t keys_per_split);

// delta = rowsum(dout * out) - dlse.
void delta(const attention::DeltaParams& params);

// The same from P and dP instead of out: the sum over keys of P dP, minus dlse. It is for 16-bit tensors, whose rounded
// out leaves an error in delta that does not cancel where dS should.
void backward_delta(const attention::BackwardParams& params);

// The gradient of a bias that is broadcast along keys. params.delta is rowsum(dout * out); this also subtracts dlse
// from it.
void dbias_from_rows(const attention::BackwardParams& params);

// Computes dQ, dK, dV and the gradients of ALiBi slopes and of a bias that has a value for each key, if they are
// wanted.
void backward(const attention::BackwardParams& params);

// The gradient of the sinks.
void backward_dsink(const attention::BackwardParams& params);

}  // namespace flash_attn_ext::cpu
