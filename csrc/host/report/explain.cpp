#include "host/report/explain.h"

#include <c10/util/Exception.h>

#include "host/backends.h"
#include "host/checks/checks.h"
#include "host/library/library.h"
#include "host/library/limits.h"
#include "host/make_params.h"
#include "host/memory/allocate.h"

namespace flash_attn_ext::host {
namespace {

// Stands for memory that a call would have, in plans that are only described.
alignas(16) char some_memory[16];

// The view of an operand's gradient, or of out: it has `columns` columns, and the order of the operand's strides.
attention::MatrixView planned_result(const at::Tensor& operand, int64_t columns, bool sequence_first = false) {
  at::DimVector sizes(operand.sizes());
  sizes.back() = columns;
  const at::DimVector strides = strides_in_order_of(operand, sizes, sequence_first);
  const bool packed = operand.dim() == 3;
  return {.data = some_memory,
          .batch_stride = packed ? 0 : strides[0],
          .head_stride = strides[1],
          .row_stride = strides[packed ? 0 : 2],
          .column_stride = strides.back()};
}

attention::BackwardParams planned_backward(const AttentionInputs& in, const std::array<bool, 6>& output_mask) {
  attention::BackwardParams params;
  static_cast<attention::AttentionParams&>(params) = make_attention_params(in);
  params.out = planned_result(in.q, in.head_dim_v(), in.sequence_first);
  params.dout = params.out;
  const auto wanted = [&](size_t gradient) { return output_mask[gradient] ? some_memory : nullptr; };
  if (output_mask[0]) params.dq = planned_result(in.q, in.q.size(-1));
  if (output_mask[1]) params.dk = planned_result(in.k, in.k.size(-1));
  if (output_mask[2]) params.dv = planned_result(in.v, in.v.size(-1));
  if (in.bias && output_mask[3]) params.dbias = describe_dbias(in);
  params.dalibi_slopes = in.alibi_slopes ? wanted(4) : nullptr;
  params.dsink = in.sink ? wanted(5) : nullptr;
  return params;
}

const library::Backend& planner_of(const AttentionInputs& in, const attention::AttentionParams& params) {
  const std::string name = in.backend ? *in.backend : choose_backend(in, params).name;
  for (const library::Backend& backend : kernels().backends) {
    if (name == backend.name) return backend;
  }
  backend_named(name);  // throws an error with all names
  TORCH_INTERNAL_ASSERT(false, "backend ", name, " has no plans");
}

}  // namespace

std::vector<Verdict> explain(const AttentionInputs& in) {
  check_inputs(in);
  if (in.backend) backend_named(*in.backend);
  const attention::AttentionParams params = make_attention_params(in);
  std::vector<Verdict> verdicts;
  for (const Backend& backend : backends()) {
    verdicts.emplace_back(backend.name, reasons_against(backend, in, params));
  }
  return verdicts;
}

std::pair<std::string, std::string> report_plans(const AttentionInputs& in, const std::array<bool, 6>& output_mask) {
  check_inputs(in);
  attention::ForwardParams params;
  static_cast<attention::AttentionParams&>(params) = make_attention_params(in);
  params.row_max.data = in.wants_row_max ? some_memory : nullptr;
  const library::Backend& planner = planner_of(in, params);
  if (!in.has_heads()) {
    return {text_of(kernels().report_forward, nullptr), text_of(kernels().report_backward, nullptr)};
  }
  const plan::Limits limits = limits_of(in.q.device());
  const ForwardPlan forward(planner.plan_forward(params, limits));
  const BackwardPlan backward(planner.plan_backward(planned_backward(in, output_mask), limits));
  return {text_of(kernels().report_forward, &*forward), text_of(kernels().report_backward, &*backward)};
}

}  // namespace flash_attn_ext::host
