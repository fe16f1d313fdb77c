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
  // Both work on the current device and stream.
  void (*forward)(const attention::ForwardParams& params);
  void (*backward)(const attention::BackwardParams& params);
};

const std::vector<Backend>& backends();

// Every backend that a call may use, with its reasons against it (none: it can run). A backend that the call did not
// ask for has that as a reason.
using Verdict = std::pair<std::string, std::vector<std::string>>;
std::vector<Verdict> explain(const AttentionInputs& inputs);

// The backend that runs the call; an error with every backend's reasons when there is none.
const Backend& choose_backend(const AttentionInputs& inputs, const attention::AttentionParams& params);

// The inputs with tensors copied where the backend cannot read them in place.
AttentionInputs readable_inputs(const Backend& backend, AttentionInputs inputs);
at::Tensor readable(const Backend& backend, const at::Tensor& operand);

}  // namespace flash_attn_ext::host
