// What would run a call: verdicts on the backends, and the plans of both passes as data.
#pragma once

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "host/call/inputs.h"

namespace flash_attn_ext::host {

// Every backend, in the order in which they are tried, with its reasons against a call (none: it can run).
using Verdict = std::pair<std::string, std::vector<std::string>>;
std::vector<Verdict> explain(const AttentionInputs& inputs);

// Reports, as JSON, the plans of the forward and the backward pass on the backend that the call names, whether or not
// it can run here, or else on the one that would run. output_mask: the gradients asked for, as in BackwardInputs. The
// backward plan is for a dout with the strides of out.
std::pair<std::string, std::string> report_plans(const AttentionInputs& inputs, const std::array<bool, 6>& output_mask);

}  // namespace flash_attn_ext::host
