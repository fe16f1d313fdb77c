#include "host/forward.h"

#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>

#include "host/attention.h"
#include "host/checks/checks.h"
#include "host/library/limits.h"
#include "host/make_params.h"
#include "host/memory/allocate.h"
#include "host/memory/readable.h"
#include "host/report/range.h"

namespace flash_attn_ext::host {
namespace {

// The view of an LSE in workspace, which is laid out like the tensor.
attention::StatisticView lse_view(const attention::ForwardParams& params, void* data) {
  const int64_t queries = params.sequences.total_q;
  const bool packed = params.sequences.cu_seqlens_q != nullptr;
  return {.data = data, .batch_stride = packed ? 0 : params.num_heads_q * queries, .head_stride = queries};
}

}  // namespace

ForwardOutputs allocate_outputs(const AttentionInputs& in, bool wants_lse) {
  at::DimVector out_sizes(in.q.sizes());
  out_sizes.back() = in.head_dim_v();
  ForwardOutputs outputs;
  outputs.out = empty_in_stride_order(in.q, out_sizes, in.sequence_first);
  if (wants_lse) outputs.lse = empty(in.lse_sizes(), in.accumulate_type(), in.q.device());
  if (in.wants_row_max) outputs.row_max = empty(in.lse_sizes(), in.accumulate_type(), in.q.device());
  return outputs;
}

void run_forward(const Backend& backend, attention::AppendingForwardParams& params, const ForwardOutputs& outputs) {
  params.out = written_matrix_view(outputs.out);
  params.lse = written_statistic_view(outputs.lse);
  params.lse_residual = written_statistic_view(outputs.lse_residual);
  params.row_max = written_statistic_view(outputs.row_max);
  const int64_t lse_bytes = plan::statistic_bytes(params);
  if (lse_bytes == 0 && !params.append.present()) return;
  const ForwardPlan plan = backend.plan_forward(params, limits_of(outputs.out.device()));
  RECORD_FUNCTION(range_name("forward", backend.name, text_of(kernels().describe_forward, *plan)),
                  c10::ArrayRef<const c10::IValue>{}, node_number());
  // Kernels write an LSE even if the caller does not want it.
  const bool wants_lse = outputs.lse.defined();
  const at::Tensor workspace = byte_memory(plan->workspace_bytes + (wants_lse ? 0 : lse_bytes), outputs.out.device());
  char* const memory = workspace.defined() ? static_cast<char*>(workspace.mutable_data_ptr()) : nullptr;
  if (!wants_lse && lse_bytes > 0) params.lse = lse_view(params, memory + plan->workspace_bytes);
  backend.forward(params, plan, memory, outputs.out.device());
}

ForwardOutputs attention_forward(const AttentionInputs& in, bool wants_lse) {
  check_in_memory(in);
  check_inputs(in);
  const c10::OptionalDeviceGuard guard(in.q.device());
  attention::AppendingForwardParams params;
  static_cast<attention::AttentionParams&>(params) = make_attention_params(in);
  const Backend& backend = choose_backend(in, params);
  const InputCopies copies = make_readable(backend, in, params);
  ForwardOutputs outputs = allocate_outputs(in, wants_lse);
  // Only an added bias moves scores so far from 0 that the LSE without a residual is too coarse for the gradients.
  if (in.bias && wants_lse) outputs.lse_residual = empty(in.lse_sizes(), in.accumulate_type(), in.q.device());
  run_forward(backend, params, outputs);
  return outputs;
}

}  // namespace flash_attn_ext::host
