#include "host/call/autograd.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/version.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>

#include "host/attention.h"
#include "host/call/fields.h"
#include "host/call/operators.h"

namespace flash_attn_ext::host {
namespace {

using torch::autograd::collect_next_edges;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

std::atomic<int64_t> num_backward_passes;

std::optional<at::Tensor> if_defined(at::Tensor tensor) {
  return tensor.defined() ? std::optional(std::move(tensor)) : std::nullopt;
}

// Autograd's node of a call: the tensors that it saves, and the backward pass. It is a C++ node like those of PyTorch's
// own operators, because host time bounds a small call. A Python Function would add a Python call and its bookkeeping
// to each pass.
class FlashAttentionFunctionBackward : public torch::autograd::Node {
 public:
  void save(const AttentionInputs& in, const ForwardOutputs& outputs) {
    auto saved = inputs_.begin();
    visit_tensors(in, [&](const auto& tensor) { *saved++ = SavedVariable(tensor, /*is_output=*/false); });
    out_ = SavedVariable(outputs.out, /*is_output=*/true);
    lse_ = SavedVariable(outputs.lse, /*is_output=*/true);
    lse_residual_ = SavedVariable(outputs.lse_residual, /*is_output=*/false);
    options_ = in;
    visit_tensors(options_, [](auto& tensor) { tensor.reset(); });
  }

  variable_list apply(variable_list&& gradients) override {
    // Other threads may traverse the same graph, and one of them may release what is saved.
    const std::lock_guard<std::mutex> lock(mutex_);
    const at::Tensor& dout = gradients[0];
    const at::Tensor& dlse = gradients[1];
    if (!dout.defined() && !dlse.defined()) return variable_list(num_outputs());
    num_backward_passes.fetch_add(1, std::memory_order_relaxed);
    const AttentionInputs inputs = unpack_inputs();
    const BackwardInputs backward = unpack_backward(dout, dlse);
    // With create_graph, or under tangents, the operator computes the gradients, because it has a derivative.
    const bool differentiated = at::GradMode::is_enabled() || has_tangent(dout) || has_tangent(dlse);
    if (differentiated || !hold_memory(inputs, backward)) return call_backward_operator(inputs, backward);
    const at::AutoDispatchBelowADInplaceOrView nothing_inside_is_recorded;
    return attention_backward(inputs, backward);
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    visit_saved(*this, [](SavedVariable& saved, bool) { saved.reset_data(); });
  }

  std::string name() const override { return "FlashAttentionFunctionBackward"; }

  // Tells compiled autograd what its graph of this node depends on.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    visit_saved(*this, [&](const SavedVariable& saved, bool is_output) { args.collect(saved, is_output); });
    for (const at::IValue& option : boxed(options_)) {
      args.collect(option.isNone());  // None and 0 have the same hash, and a window of 0 is not an absent one
      args.collect(option, /*nested=*/true);
    }
    for (size_t edge = 0; edge < num_outputs(); ++edge) args.collect(task_should_compute_output(edge));
  }

  variable_list apply_with_saved(const variable_list& gradients,
                                 torch::dynamo::autograd::SwapSavedVariables& placeholders) override {
    visit_saved(*this, [&](SavedVariable& saved, bool) { placeholders.before(saved); });
    variable_list results = apply(variable_list(gradients));
    visit_saved(*this, [&](SavedVariable& saved, bool) { placeholders.after(saved); });
    return results;
  }

 private:
  template <class Self, class Visit>
  static void visit_saved(Self& self, Visit visit) {
    for (auto& saved : self.inputs_) visit(saved, /*is_output=*/false);
    visit(self.out_, /*is_output=*/true);
    visit(self.lse_, /*is_output=*/true);
    visit(self.lse_residual_, /*is_output=*/false);
  }

  AttentionInputs unpack_inputs() const {
    AttentionInputs in = options_;
    auto saved = inputs_.begin();
    visit_tensors(in, [&](auto& tensor) {
      if (at::Tensor unpacked = (saved++)->unpack(); unpacked.defined()) tensor = std::move(unpacked);
    });
    return in;
  }

  BackwardInputs unpack_backward(const at::Tensor& dout, const at::Tensor& dlse) {
    BackwardInputs backward{.dout = dout,
                            .dlse = if_defined(dlse),
                            .out = out_.unpack(getptr()),
                            .lse = lse_.unpack(getptr()),
                            .lse_residual = if_defined(lse_residual_.unpack()),
                            .output_mask = {}};
    if (!dout.defined()) backward.dout = at::zeros_like(backward.out);
    for (size_t edge = 0; edge < num_outputs(); ++edge) backward.output_mask[edge] = task_should_compute_output(edge);
    return backward;
  }

  static bool has_tangent(const at::Tensor& gradient) {
    return gradient.defined() && gradient._fw_grad(/*level=*/0).defined();
  }

  std::array<SavedVariable, kNumTensors> inputs_;
  SavedVariable out_;
  SavedVariable lse_;
  SavedVariable lse_residual_;
  AttentionInputs options_{};  // without the tensors
};

// Since torch 2.13, autograd's graph counts its references in the nodes themselves.
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
std::shared_ptr<FlashAttentionFunctionBackward> make_node() {
  return {new FlashAttentionFunctionBackward, torch::autograd::deleteNode};
}
#else
c10::intrusive_ptr<FlashAttentionFunctionBackward> make_node() {
  return c10::make_intrusive<FlashAttentionFunctionBackward>();
}
#endif

}  // namespace

ForwardOutputs attention(const AttentionInputs& in, bool wants_lse) {
  const bool recorded = std::apply(
      [&](auto... field) { return torch::autograd::compute_requires_grad(in.*field.member...); }, kDifferentiable);
  if (!recorded) return attention_forward(in, wants_lse);
  ForwardOutputs outputs;
  {
    const at::AutoDispatchBelowADInplaceOrView nothing_inside_is_recorded;
    outputs = attention_forward(in, /*wants_lse=*/true);
  }
  const auto node = make_node();
  node->set_next_edges(
      std::apply([&](auto... field) { return collect_next_edges(in.*field.member...); }, kDifferentiable));
  torch::autograd::set_history(outputs.out, node);
  torch::autograd::set_history(outputs.lse, node);
  node->save(in, outputs);
  return outputs;
}

int64_t num_recorded_backward_passes() { return num_backward_passes.load(); }

}  // namespace flash_attn_ext::host
