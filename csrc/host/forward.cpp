#include "host/forward.h"

#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>

#include "host/allocate.h"
#include "host/attention.h"
#include "host/checks.h"
#include "host/limits.h"
#include "host/make_params.h"
#include "host/readable.h"
#include "host/report/range.h"

namespace flash_attn_ext::host {

ForwardOutputs allocate_outputs(const AttentionInputs& in) {
  at::DimVector out_sizes(in.q.sizes());
  out_sizes.back() = in.head_dim_v();
  ForwardOutputs outputs;
  outputs.out = empty_in_stride_order(in.q, out_sizes, in.sequence_first);
  outputs.lse = at::empty(in.lse_sizes(), in.q.options().dtype(in.accumulate_type()));
  return outputs;
}

void run_forward(const Backend& backend, attention::ForwardParams& params, const ForwardOutputs& outputs) {
  params.out = matrix_view(outputs.out);
  params.lse = statistic_view(outputs.lse);
  params.lse_residual = statistic_view(outputs.lse_residual);
  if (outputs.lse.numel() == 0) return;
  const plan::ForwardPlan plan = backend.plan_forward(params, limits_of(outputs.out.device()));
  RECORD_FUNCTION(range_name("forward", backend.name, plan::describe(plan)), c10::ArrayRef<const c10::IValue>{},
                  node_number());
  const at::Tensor workspace = byte_memory(plan.workspace.bytes, outputs.out.options());
  backend.forward(params, plan, workspace.defined() ? workspace.data_ptr() : nullptr);
}

ForwardOutputs attention_forward(const AttentionInputs& in) {
  check_in_memory(in);
  check_inputs(in);
  const c10::OptionalDeviceGuard guard(in.q.device());
  attention::ForwardParams params;
  static_cast<attention::AttentionParams&>(params) = make_attention_params(in);
  const Backend& backend = choose_backend(in, params);
  const InputCopies copies = make_readable(backend, in, params);
  ForwardOutputs outputs = allocate_outputs(in);
  // Only an added bias moves scores so far from 0 that the LSE alone is too coarse for the gradients.
  if (in.bias) outputs.lse_residual = at::empty(in.lse_sizes(), outputs.lse.options());
  run_forward(backend, params, outputs);
  return outputs;
}

}  // namespace flash_attn_ext::host
