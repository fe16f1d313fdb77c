// Autograd nodes of look_up and table_sums, which are each other's derivatives.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/index_add.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/version.h>

#include <memory>

#include "host/call/operators.h"
#include "host/checks/tensor_checks.h"
#include "host/tables/table_sums.h"

namespace flash_attn_ext::host {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

at::Tensor recorded_sums(const at::Tensor& values, const at::Tensor& entries, int64_t num_entries,
                         at::ScalarType dtype);

// Whether kernels may read a gradient: it is neither traced nor batched, and has no tangent.
bool takes_kernels(const at::Tensor& gradient) {
  return !is_watched() && !is_transformed() && holds_memory(gradient) &&
         !gradient.key_set().has(c10::DispatchKey::Batched);
}

// What compilers and traces see instead of the kernel.
at::Tensor operator_sums(const at::Tensor& values, const at::Tensor& entries, int64_t num_entries) {
  static const auto sums = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("flash_attn_ext::table_sums", "")
                               .typed<at::Tensor(const at::Tensor&, const at::Tensor&, c10::SymInt)>();
  return sums.call(values, entries, num_entries);
}

class TableNode : public torch::autograd::Node {
 public:
  void save(const at::Tensor& entries, int64_t num_entries, at::ScalarType dtype) {
    entries_ = SavedVariable(entries, /*is_output=*/false);
    num_entries_ = num_entries;
    dtype_ = dtype;
  }

  void release_variables() override { entries_.reset_data(); }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(entries_, /*is_output=*/false);
    args.collect(num_entries_);
    args.collect(static_cast<int64_t>(dtype_));
  }

  variable_list apply_with_saved(const variable_list& gradients,
                                 torch::dynamo::autograd::SwapSavedVariables& placeholders) override {
    placeholders.before(entries_);
    variable_list results = apply(variable_list(gradients));
    placeholders.after(entries_);
    return results;
  }

 protected:
  SavedVariable entries_;
  int64_t num_entries_ = 0;
  at::ScalarType dtype_ = at::kFloat;  // of the gradient
};

class TableLookUpBackward : public TableNode {
 public:
  std::string name() const override { return "TableLookUpBackward"; }

  variable_list apply(variable_list&& gradients) override {
    if (!gradients[0].defined()) return {at::Tensor()};
    const at::Tensor entries = entries_.unpack();
    const at::Tensor& gradient = gradients[0];
    if (takes_kernels(gradient)) return {recorded_sums(gradient, entries, num_entries_, dtype_)};
    if (is_watched() || !holds_memory(gradient)) return {operator_sums(gradient, entries, num_entries_).to(dtype_)};
    const at::ScalarType accumulate = accumulate_type(gradient);
    const at::Tensor zeros = at::zeros({gradient.size(0), num_entries_}, gradient.options().dtype(accumulate));
    return {at::index_add(zeros, 1, entries, gradient.to(accumulate)).to(dtype_)};
  }
};

class TableSumsBackward : public TableNode {
 public:
  std::string name() const override { return "TableSumsBackward"; }

  variable_list apply(variable_list&& gradients) override {
    if (!gradients[0].defined()) return {at::Tensor()};
    const at::Tensor entries = entries_.unpack();
    const at::Tensor& gradient = gradients[0];
    if (takes_kernels(gradient)) return {recorded_look_up(gradient, entries).to(dtype_)};
    return {at::index_select(gradient, 1, entries).to(dtype_)};
  }
};

// Since torch 2.13, autograd's graph counts its references in the nodes themselves.
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
template <class Node>
std::shared_ptr<Node> make_node() {
  return {new Node, torch::autograd::deleteNode};
}
#else
template <class Node>
c10::intrusive_ptr<Node> make_node() {
  return c10::make_intrusive<Node>();
}
#endif

template <class Node>
void record(const at::Tensor& result, const at::Tensor& of, const at::Tensor& entries, int64_t num_entries) {
  const auto node = make_node<Node>();
  node->set_next_edges(torch::autograd::collect_next_edges(of));
  torch::autograd::set_history(result, node);
  node->save(entries, num_entries, of.scalar_type());
}

at::Tensor recorded_sums(const at::Tensor& values, const at::Tensor& entries, int64_t num_entries,
                         at::ScalarType dtype) {
  at::Tensor sums;
  {
    const at::AutoDispatchBelowADInplaceOrView nothing_inside_is_recorded;
    sums = table_sums(values, entries, num_entries, dtype);
  }
  if (torch::autograd::compute_requires_grad(values)) record<TableSumsBackward>(sums, values, entries, num_entries);
  return sums;
}

}  // namespace

at::Tensor recorded_look_up(const at::Tensor& table, const at::Tensor& entries) {
  at::Tensor looked_up;
  {
    const at::AutoDispatchBelowADInplaceOrView nothing_inside_is_recorded;
    looked_up = look_up(table, entries);
  }
  if (torch::autograd::compute_requires_grad(table)) {
    record<TableLookUpBackward>(looked_up, table, entries, table.size(1));
  }
  return looked_up;
}

}  // namespace flash_attn_ext::host
