// What would run a call.
#pragma once

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "host/call/inputs.h"
#include "kernels/plan/report.h"

namespace flash_attn_ext::host {

// Every backend, in the order in which they are tried, with its reasons against a call (none: it can run).
using Verdict = std::pair<std::string, std::vector<std::string>>;
std::vector<Verdict> explain(const AttentionInputs& inputs);

// The plans of the forward and the backward pass on the backend that the call names, whether or not it can run here, or
// else on the one that runs. output_mask: the gradients asked for, as in BackwardInputs. The plan of the backward pass
// is that of a dout which lies in memory as out does.
std::pair<plan::Report, plan::Report> report_plans(const AttentionInputs& inputs,
                                                   const std::array<bool, 6>& output_mask);

}  // namespace flash_attn_ext::host
