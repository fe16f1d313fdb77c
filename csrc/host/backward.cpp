#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>

#include "host/attention.h"
#include "host/backends.h"
#include "host/checks/checks.h"
#include "host/library/limits.h"
#include "host/make_params.h"
#include "host/memory/allocate.h"
#include "host/memory/readable.h"
#include "host/report/range.h"

namespace flash_attn_ext::host {
namespace {

enum Gradient { kDq, kDk, kDv, kDbias, kDalibiSlopes, kDsink, kNumGradients };

// The gradients in the type and shape that kernels write. Those that are not asked for are undefined.
struct Gradients {
  at::Tensor dq, dk, dv;
  at::Tensor dbias;          // bias's shape
  at::Tensor dalibi_slopes;  // (batch, heads)
  at::Tensor dsink;          // (heads,)
};

// Allocates all gradients but dbias, whose type follows from the plan.
Gradients allocate_gradients(const AttentionInputs& in, const std::array<bool, kNumGradients>& wanted) {
  const at::TensorOptions accumulate = in.q.options().dtype(in.accumulate_type());
  Gradients g;
  if (wanted[kDq]) g.dq = empty_in_stride_order(in.q, in.q.sizes());
  if (wanted[kDk]) g.dk = empty_in_stride_order(in.k, in.k.sizes());
  if (wanted[kDv]) g.dv = empty_in_stride_order(in.v, in.v.sizes());
  if (wanted[kDalibiSlopes]) g.dalibi_slopes = at::zeros({in.batch(), in.num_heads_q()}, accumulate);
  if (wanted[kDsink]) g.dsink = empty({in.num_heads_q()}, in.accumulate_type(), in.q.device());
  return g;
}

void set_gradients(attention::BackwardParams& params, const Gradients& g) {
  params.dq = written_matrix_view(g.dq);
  params.dk = written_matrix_view(g.dk);
  params.dv = written_matrix_view(g.dv);
  params.dalibi_slopes = g.dalibi_slopes.defined() ? g.dalibi_slopes.mutable_data_ptr() : nullptr;
  params.dsink = g.dsink.defined() ? g.dsink.mutable_data_ptr() : nullptr;
}

at::Tensor allocate_dbias(const AttentionInputs& in, bool written_once, attention::BiasGradient& dbias) {
  const at::Tensor gradient = written_once ? empty(in.bias->sizes(), in.bias->scalar_type(), in.q.device())
                                           : at::zeros(in.bias->sizes(), in.q.options().dtype(in.accumulate_type()));
  const auto stride = [&](int64_t d) { return in.bias->size(d) != 1 ? gradient.stride(d) : int64_t{0}; };
  dbias.data = gradient.mutable_data_ptr();
  dbias.element = element_type(gradient.scalar_type());
  dbias.starts_at_zero = !written_once;
  dbias.batch_stride = stride(0);
  dbias.head_stride = stride(1);
  dbias.query_stride = stride(2);
  dbias.key_stride = stride(3);
  if (in.bias_is_relative && gradient.numel() > 0) {
    dbias.data = static_cast<char*>(dbias.data) + (in.q.size(2) - 1) * gradient.element_size();
    dbias.query_stride = -1;
    dbias.key_stride = 1;
  }
  return gradient;
}

// Plans and runs the pass. All gradients are allocated already but dbias, which is allocated here, as the plan says.
void run_backward(const Backend& backend, const AttentionInputs& in, const BackwardInputs& backward,
                  attention::BackwardParams& params, at::Tensor& dbias) {
  const InputCopies copies = make_readable(backend, in, params);
  const at::Tensor dout = readable_matrix(backend, "dout", backward.dout);
  const at::Tensor lse = readable_array("lse", backward.lse);
  std::optional<at::Tensor> residual, dlse;
  if (backward.lse_residual) residual = readable_array("lse_residual", *backward.lse_residual);
  if (backward.dlse) dlse = readable_array("dlse", backward.dlse->to(in.accumulate_type()));
  params.out = matrix_view(backward.out);
  params.dout = matrix_view(dout);
  params.lse = statistic_view(lse);
  params.lse_residual = residual ? statistic_view(*residual) : attention::StatisticView();
  params.dlse = dlse ? statistic_view(*dlse) : attention::StatisticView();
  const BackwardPlan plan = backend.plan_backward(params, limits_of(in.q.device()));
  require_sms(plan->co_resident_ctas, in.q.device());
  RECORD_FUNCTION(range_name("backward", backend.name, text_of(kernels().describe_backward, *plan)),
                  c10::ArrayRef<const c10::IValue>{});
  if (params.dbias.present()) dbias = allocate_dbias(in, plan->writes_dbias_once, params.dbias);
  const at::Tensor workspace = byte_memory(plan->workspace_bytes, in.q.device());
  void* const memory = workspace.defined() ? workspace.mutable_data_ptr() : nullptr;
  backend.backward(params, plan, memory, in.q.device());
}

// Converts the kernels' gradients to the shapes and dtypes of the inputs.
std::vector<at::Tensor> finish(const AttentionInputs& in, Gradients g) {
  if (g.dbias.defined()) g.dbias = g.dbias.to(in.bias->scalar_type());
  if (g.dalibi_slopes.defined() && in.alibi_slopes->dim() == 1) g.dalibi_slopes = g.dalibi_slopes.sum(0);
  return {std::move(g.dq),   std::move(g.dk), std::move(g.dv), std::move(g.dbias), std::move(g.dalibi_slopes),
          std::move(g.dsink)};
}

}  // namespace

std::vector<at::Tensor> attention_backward(const AttentionInputs& in, const BackwardInputs& backward) {
  check_in_memory(in);
  check_inputs(in);
  check_backward_inputs(in, backward);
  const c10::OptionalDeviceGuard guard(in.q.device());
  attention::BackwardParams params;
  static_cast<attention::AttentionParams&>(params) = make_attention_params(in);
  const Backend& backend = choose_backend(in, params);
  Gradients gradients = allocate_gradients(in, backward.output_mask);
  set_gradients(params, gradients);
  if (backward.output_mask[kDbias]) params.dbias = describe_dbias(in);
  if (in.has_heads()) {
    run_backward(backend, in, backward, params, gradients.dbias);
  } else {  // k, v and a bias may have elements even then
    if (gradients.dk.defined()) gradients.dk.zero_();
    if (gradients.dv.defined()) gradients.dv.zero_();
    if (gradients.dsink.defined()) gradients.dsink.zero_();
    if (params.dbias.present()) gradients.dbias = at::zeros(in.bias->sizes(), in.bias->options());
  }
  return finish(in, std::move(gradients));
}

}  // namespace flash_attn_ext::host
