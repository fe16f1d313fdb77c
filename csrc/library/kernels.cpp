#include "library/kernels.h"

#include "kernels/cpu/cpu_kernels.h"
#include "library/table.h"

namespace flash_attn_ext::library {
namespace {

Status cpu_append(const attention::AppendParams& params, void*) {
  cpu::append_kv(params);
  return 0;
}

Status cpu_forward(const attention::AppendingForwardParams& params, const plan::ForwardPlan& plan, void*, void*) {
  if (params.append.present()) cpu::append_kv(params.append);
  cpu::forward(params, plan.keys_per_split);
  return 0;
}

Status cpu_backward(const attention::BackwardParams& given, const plan::BackwardPlan& plan, void* workspace, void*) {
  attention::BackwardParams params = given;
  params.delta = plan.workspace.delta.like(params.lse, workspace);
  const bool sums_rows = plan.dbias == plan::BiasGradientSource::kRowSums;
  if (sums_rows) params.dlse = {};  // dbias_from_rows subtracts it
  if (plan.delta == plan::DeltaSource::kExactKernel) {
    cpu::backward_delta(params);
  } else {
    cpu::delta(attention::delta_params(params));
  }
  if (sums_rows) {
    params.dlse = given.dlse;
    cpu::dbias_from_rows(params);
    params.dbias = {};
  }
  if (params.dq.data || params.dk.data || params.dv.data || params.dbias.present() || params.dalibi_slopes) {
    cpu::backward(params);
  }
  if (params.dsink) cpu::backward_dsink(params);
  return 0;
}

Status cpu_delta(const attention::DeltaParams& params, void*) {
  cpu::delta(params);
  return 0;
}

void add_plans(Kernels& table) {
  Backend* row = table.backends;
  for (const plan::Planner& planner : plan::kPlanners) {
    row->name = planner.name;
    row->plan_forward = planner.forward;
    row->plan_backward = planner.backward;
    ++row;
  }
  table.plan_tangents = plan::plan_tangents;
  table.describe_forward = plan::describe;
  table.describe_backward = plan::describe;
  table.describe_tangents = plan::describe;
  table.report_forward = plan::report;
  table.report_backward = plan::report;
  table.words_of = plan::words_of;
}

void add_cpu_kernels(Kernels& table) {
  Backend& row = row_of("cpu", table);
  row.append = cpu_append;
  row.forward = cpu_forward;
  row.backward = cpu_backward;
  row.delta = cpu_delta;
}

Kernels make_table() {
  Kernels table{};
  add_plans(table);
  add_cpu_kernels(table);
#if FLASH_ATTN_EXT_WITH_CUDA
  add_gpu_kernels(table);
#endif
  return table;
}

}  // namespace
}  // namespace flash_attn_ext::library

const flash_attn_ext::library::Kernels* flash_attn_ext_kernels(const flash_attn_ext::cpu::Services* services) {
  static const flash_attn_ext::library::Kernels table = flash_attn_ext::library::make_table();
  flash_attn_ext::cpu::set_services(*services);
  return &table;
}
