// The ordered table of backends. The first that states no reason against a call runs it.
#pragma once

#include <string>
#include <vector>

#include "attention/append.h"
#include "attention/params.h"
#include "host/call/inputs.h"
#include "host/library/library.h"
#include "host/reasons.h"

namespace flash_attn_ext::host {

struct Backend {
  const char* name;
  bool on_gpu;
  // Adds why it cannot run a call whose tensors are on that device.
  void (*find_reasons_against)(const attention::AttentionParams& params, at::Device device, Reasons& reasons);
  // Whether its kernels can read a matrix operand in place; otherwise it is copied first.
  bool (*readable)(const at::Tensor& operand);
  const library::Backend* compiled;

  ForwardPlan plan_forward(const attention::ForwardParams& params, const plan::Limits& limits) const {
    return ForwardPlan(compiled->plan_forward(params, limits));
  }
  BackwardPlan plan_backward(const attention::BackwardParams& params, const plan::Limits& limits) const {
    return BackwardPlan(compiled->plan_backward(params, limits));
  }

  // What follows runs on the device, which is the current one, and on its current stream.

  // Appends the new keys of a call to their cache, whatever its strides, and rotates them and q. It runs before
  // `forward` if that cannot read the cache in place.
  void append(const attention::AppendParams& params, at::Device device) const {
    launch(device, [&](void* stream) { return compiled->append(params, stream); });
  }
  // Run the passes as the plan says, with plan->workspace_bytes of workspace. `forward` first appends new keys to their
  // cache, and rotates them and q.
  void forward(const attention::AppendingForwardParams& params, const ForwardPlan& plan, void* workspace,
               at::Device device) const {
    launch(device, [&](void* stream) { return compiled->forward(params, *plan, workspace, stream); });
  }
  void backward(const attention::BackwardParams& params, const BackwardPlan& plan, void* workspace,
                at::Device device) const {
    launch(device, [&](void* stream) { return compiled->backward(params, *plan, workspace, stream); });
  }
  void delta(const attention::DeltaParams& params, at::Device device) const {
    launch(device, [&](void* stream) { return compiled->delta(params, stream); });
  }
};

const std::vector<Backend>& backends();

// The reasons why a backend cannot run a call; empty if it can. A request for another backend is a reason, too.
std::vector<std::string> reasons_against(const Backend& backend, const AttentionInputs& inputs,
                                         const attention::AttentionParams& params);

// The backend of a name, whether or not it can run a call. Throws an error with all names if there is none.
const Backend& backend_named(const std::string& name);

// The backend that runs the call. Throws an error with every backend's reasons if there is none.
const Backend& choose_backend(const AttentionInputs& inputs, const attention::AttentionParams& params);

}  // namespace flash_attn_ext::host
