#include "host/call/operators.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include "host/call/fields.h"
#include "host/checks/tensor_checks.h"

namespace flash_attn_ext::host {

bool is_watched() { return c10::impl::TorchDispatchModeTLS::any_modes_set() || torch::jit::tracer::isTracing(); }

bool is_transformed() {
  const c10::DispatchKeySet included = c10::impl::tls_local_dispatch_key_set().included_;
  return included.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         included.has(c10::DispatchKey::FuncTorchDynamicLayerBackMode) ||
         torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr;
}

bool hold_memory(const AttentionInputs& in, const BackwardInputs& backward) {
  return !is_watched() && holds_memory(in.q) && holds_memory(in.k) && holds_memory(in.v) &&
         holds_memory(backward.dout) && (!backward.dlse || holds_memory(*backward.dlse)) &&
         holds_memory(backward.out) && holds_memory(backward.lse);
}

torch::jit::Stack boxed(const AttentionInputs& in) {
  torch::jit::Stack stack;
  visit_fields(in, [&](const char*, const auto& value) { torch::jit::push_one(stack, value); });
  return stack;
}

std::vector<at::Tensor> call_backward_operator(const AttentionInputs& in, const BackwardInputs& backward) {
  const c10::OperatorHandle op =
      c10::Dispatcher::singleton().findSchemaOrThrow("flash_attn_ext::attention_backward", "");
  torch::jit::Stack stack;
  torch::jit::push(stack, backward.dout, backward.dlse, backward.out, backward.lse, backward.lse_residual,
                   backward.output_mask);
  for (at::IValue& argument : boxed(in)) stack.push_back(std::move(argument));
  op.callBoxed(stack);
  std::vector<at::Tensor> gradients;
  for (size_t i = 0; i < backward.output_mask.size(); ++i) {
    // An operator has no absent results, so those that were not asked for are dropped here.
    gradients.push_back(backward.output_mask[i] ? stack[i].toTensor() : at::Tensor());
  }
  return gradients;
}

}  // namespace flash_attn_ext::host
