// The ordered table of backends. The first that states no reason against a call runs it.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "attention/params.h"
#include "host/inputs.h"

namespace flash_attn_ext::host {

struct Backend {
  const char* name;
  std::vector<std::string> (*unsupported_reasons)(const attention::AttentionParams& params, at::Device device);
  // Whether its kernels can read a matrix operand where it is; what they cannot is copied first.
  bool (*readable)(const at::Tensor& operand);
  // How many partial sums of an ALiBi slope's gradient it writes; null when it writes the gradient itself.
  int64_t (*num_alibi_partials)(const attention::AttentionParams& params);
  // The memory that its backward pass keeps scores in, for params.spill.ds, of at most params.spill.max_bytes; null
  // when it never does.
  int64_t (*spill_bytes)(const attention::BackwardParams& params);
  // Whether its backward pass computes delta itself (params.delta_is_left); null when it never does.
  bool (*computes_delta)(const attention::BackwardParams& params);
  // Whether its backward pass writes each element of a bias's gradient, once, in the bias's own dtype; else, and where
  // null, it adds to zeros of the accumulate type. Asked before there is memory for that gradient or for kept scores,
  // and only about calls with batch entries and heads.
  bool (*writes_dbias_once)(const attention::BackwardParams& params);
  // The memory in which it notes what a mask's tiles hold, for params.score_mod.mask_tiles.data; null when it never
  // does.
  int64_t (*mask_tile_bytes)(const attention::AttentionParams& params);
  // Both work on the current device and stream.
  void (*forward)(const attention::ForwardParams& params);
  void (*backward)(const attention::BackwardParams& params);
};

const std::vector<Backend>& backends();

// How much memory a backward pass may take to keep scores: 2 GiB, and not more than a 64th of the device's.
int64_t max_spill_bytes(at::Device device);

// Room for what the backend notes about a mask's tiles; undefined where it notes nothing.
at::Tensor mask_tile_memory(const Backend& backend, const attention::AttentionParams& params,
                            const at::TensorOptions& options);

// Every backend that a call may use, with its reasons against it (none: it can run). A backend that the call did not
// ask for has that as a reason.
using Verdict = std::pair<std::string, std::vector<std::string>>;
std::vector<Verdict> explain(const AttentionInputs& inputs);

// The backend that runs the call; an error with every backend's reasons when there is none.
const Backend& choose_backend(const AttentionInputs& inputs, const attention::AttentionParams& params);

}  // namespace flash_attn_ext::host
