// Every requirement on an attention call's tensors and options. Each message names the tensor, what was got, what is
// allowed and what to do.
#pragma once

#include "host/call/cache_inputs.h"
#include "host/call/inputs.h"
#include "host/checks/sequence_lengths.h"

namespace flash_attn_ext::host {

// Checks that kernels can read all tensors of a call whose q, k and v they can read. Plans do not need it.
void check_in_memory(const AttentionInputs& inputs);
void check_in_memory(const KvCacheInputs& cache);

void check_inputs(const AttentionInputs& inputs);
// The parts of check_inputs that concern bias, mask, slopes and sink, for sequences of up to these lengths, and those
// that concern options.
void check_score_tensors(const AttentionInputs& inputs, const SequenceLengths& longest);
void check_options(const AttentionInputs& inputs);

// `k_name`: the caller's name for the keys.
void check_head_counts(const AttentionInputs& inputs, const char* k_name);

// Whether a bias or mask has four dimensions, each of them 1 or that of the scores.
bool broadcasts_to_scores(const at::Tensor& table, const AttentionInputs& inputs, const SequenceLengths& longest);

void check_backward_inputs(const AttentionInputs& inputs, const BackwardInputs& backward);
void check_delta_inputs(const at::Tensor& out, const at::Tensor& dout, const std::optional<at::Tensor>& dlse);

// Throws ValueError for an unknown alignment of causality, or a window with a negative number of keys.
void check_visibility(const std::optional<std::string>& causal, const std::optional<int64_t>& window_left,
                      const std::optional<int64_t>& window_right);

// Throws ValueError for a dropout probability outside [0, 1].
void check_dropout_probability(double dropout_p);

// Checks the seed of a call with dropout.
void check_rng_seed(const at::Tensor& rng_seed, at::Device device);

}  // namespace flash_attn_ext::host
