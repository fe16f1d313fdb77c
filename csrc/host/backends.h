// The ordered table of backends. The first that states no reason against a call runs it.
#pragma once

#include <string>
#include <vector>

#include "attention/append.h"
#include "attention/params.h"
#include "host/call/inputs.h"
#include "host/reasons.h"
#include "kernels/plan/plan.h"

namespace flash_attn_ext::host {

struct Backend {
  const char* name;
  // Adds why it cannot run a call whose tensors are on that device.
  void (*find_reasons_against)(const attention::AttentionParams& params, at::Device device, Reasons& reasons);
  // Whether its kernels can read a matrix operand where it is; what they cannot is copied first.
  bool (*readable)(const at::Tensor& operand);
  // Puts the new keys of a call into their cache, whatever its strides, and rotates them and q: the first step of
  // `forward` where that cannot read the cache in place. On the current device and stream.
  void (*append)(const attention::AppendParams& params);
  plan::ForwardPlan (*plan_forward)(const attention::ForwardParams& params, const plan::Limits& limits);
  plan::BackwardPlan (*plan_backward)(const attention::BackwardParams& params, const plan::Limits& limits);
  // Both passes, as the plan says, in plan.workspace.bytes of memory. All work on the current device and stream. New
  // keys go into their cache first, and they and q are rotated.
  void (*forward)(const attention::AppendingForwardParams& params, const plan::ForwardPlan& plan, void* workspace);
  void (*backward)(const attention::BackwardParams& params, const plan::BackwardPlan& plan, void* workspace);
};

const std::vector<Backend>& backends();

// Why a backend cannot run a call (nothing: it can). Not to be what the call asked for is a reason too.
std::vector<std::string> reasons_against(const Backend& backend, const AttentionInputs& inputs,
                                         const attention::AttentionParams& params);

// The backend of a name, whether or not it can run a call; an error with all names when there is none.
const Backend& backend_named(const std::string& name);

// The backend that runs the call; an error with every backend's reasons when there is none.
const Backend& choose_backend(const AttentionInputs& inputs, const attention::AttentionParams& params);

}  // namespace flash_attn_ext::host
