#include "host/report/explain.h"

#include <c10/util/Exception.h>

#include "host/backends.h"
#include "host/checks.h"
#include "host/limits.h"
#include "host/make_params.h"

namespace flash_attn_ext::host {
namespace {

// Stands for memory that a call would have, in plans that nobody carries out.
alignas(16) char some_memory[16];

attention::MatrixView planned_output(const AttentionInputs& in) {
  const int64_t rows = in.packed() ? in.q.size(0) : in.q.size(2);
  const int64_t columns = in.head_dim_v();
  return {.data = some_memory,
          .batch_stride = in.packed() ? 0 : in.num_heads_q() * rows * columns,
          .head_stride = rows * columns,
          .row_stride = columns,
          .column_stride = 1};
}

// As empty_in_stride_order lays it out: in the operand's own order, or contiguous where that repeats elements.
attention::MatrixView planned_gradient(const at::Tensor& operand, const attention::MatrixView& view) {
  attention::MatrixView gradient = view;
  if (!operand.is_non_overlapping_and_dense()) {
    const int64_t columns = operand.size(-1);
    const int64_t rows = operand.size(-2);
    const bool packed = operand.dim() == 3;
    gradient.batch_stride = packed ? 0 : operand.size(1) * rows * columns;
    gradient.head_stride = packed ? columns : rows * columns;
    gradient.row_stride = packed ? rows * columns : columns;
    gradient.column_stride = 1;
  }
  gradient.data = some_memory;
  return gradient;
}

attention::BackwardParams planned_backward(const AttentionInputs& in, const std::array<bool, 6>& output_mask) {
  attention::BackwardParams params;
  static_cast<attention::AttentionParams&>(params) = make_attention_params(in);
  params.out = planned_output(in);
  params.dout = planned_output(in);
  const auto wanted = [&](size_t gradient) { return output_mask[gradient] ? some_memory : nullptr; };
  if (output_mask[0]) params.dq = planned_gradient(in.q, params.q);
  if (output_mask[1]) params.dk = planned_gradient(in.k, params.k);
  if (output_mask[2]) params.dv = planned_gradient(in.v, params.v);
  if (in.bias && output_mask[3]) params.dbias = describe_dbias(*in.bias);
  params.dalibi_slopes = in.alibi_slopes ? wanted(4) : nullptr;
  params.dsink = in.sink ? wanted(5) : nullptr;
  return params;
}

const plan::Planner& planner_of(const AttentionInputs& in, const attention::AttentionParams& params) {
  const std::string name = in.backend ? *in.backend : choose_backend(in, params).name;
  for (const plan::Planner& planner : plan::kPlanners) {
    if (name == planner.name) return planner;
  }
  backend_named(name);  // says which there are
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

std::pair<std::string, std::string> describe_plans(const AttentionInputs& in, const std::array<bool, 6>& output_mask) {
  check_inputs(in);
  attention::ForwardParams params;
  static_cast<attention::AttentionParams&>(params) = make_attention_params(in);
  const plan::Planner& planner = planner_of(in, params);
  if (!in.has_heads()) return {"nothing: there are no heads", "nothing: there are no heads"};
  const plan::Limits limits = limits_of(in.q.device());
  const plan::BackwardPlan backward = planner.backward(planned_backward(in, output_mask), limits);
  return {plan::describe(planner.forward(params, limits)), plan::describe(backward)};
}

}  // namespace flash_attn_ext::host
