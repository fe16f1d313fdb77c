#include "library/kernels.h"

#include <new>
#include <string>
#include <type_traits>

#include "kernels/cpu/cpu_kernels.h"
#include "kernels/plan/plan.h"
#include "kernels/plan/report.h"
#include "library/gpu_code.h"
#include "library/table.h"

namespace flash_attn_ext::library {
namespace {

template <class Function>
Status status_of(const Function& function) {
  try {
    function();
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
  return 0;
}

Status cpu_append(const attention::AppendParams& params, void*) {
  return status_of([&] { cpu::append_kv(params); });
}

Status cpu_forward(const attention::AppendingForwardParams& params, const plan::ForwardPlan& plan, void*, void*) {
  return status_of([&] {
    if (params.append.present()) cpu::append_kv(params.append);
    cpu::forward(params, plan.keys_per_split);
  });
}

void compute_gradients(const attention::BackwardParams& given, const plan::BackwardPlan& plan, void* workspace) {
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
}

Status cpu_backward(const attention::BackwardParams& params, const plan::BackwardPlan& plan, void* workspace, void*) {
  return status_of([&] { compute_gradients(params, plan, workspace); });
}

Status cpu_delta(const attention::DeltaParams& params, void*) {
  return status_of([&] { cpu::delta(params); });
}

// What passes the boundary has no constructor or destructor that both sides would have to agree on.
template <class... Structs>
constexpr bool kPlain = (std::is_trivially_copyable_v<Structs> && ...);
static_assert(
    kPlain<attention::AppendingForwardParams, attention::BackwardParams, attention::TangentParams,
           attention::DeltaParams, attention::AppendParams, derivatives::PlainTile, derivatives::PlainWeights,
           derivatives::PlainGradients, common::TableLookUp, common::TableSums, common::BlockMaskOfLists, plan::Limits,
           plan::TangentPlan, cpu::Services, PlannedForward, PlannedBackward, TextSink, Gpu, Facts, Kernels>);

template <auto kPlan>
PlannedForward plan_forward(const attention::ForwardParams& params, const plan::Limits& limits) {
  try {
    const auto* made = new plan::ForwardPlan(kPlan(params, limits));
    return {.plan = made, .workspace_bytes = made->workspace.bytes};
  } catch (const std::bad_alloc&) {
    return {};
  }
}

template <auto kPlan>
PlannedBackward plan_backward(const attention::BackwardParams& params, const plan::Limits& limits) {
  try {
    const auto* made = new plan::BackwardPlan(kPlan(params, limits));
    return {.plan = made,
            .workspace_bytes = made->workspace.bytes,
            .co_resident_ctas = made->order.cyclic ? made->persistent_ctas : 0,
            .writes_dbias_once = made->writes_dbias_once};
  } catch (const std::bad_alloc&) {
    return {};
  }
}

template <class Plan>
Status describe(const Plan& plan, const TextSink& sink) {
  return status_of([&] { sink.append(sink.context, plan::describe(plan).c_str()); });
}

template <class Plan>
Status report(const Plan* plan, const TextSink& sink) {
  return status_of([&] {
    const plan::Report report = plan ? plan::report(*plan) : plan::Report{.kernel = "nothing: there are no heads"};
    sink.append(sink.context, plan::json_of(report).c_str());
  });
}

void add_plans(Kernels& table) {
  Backend& sm90 = table.backends[kSm90];
  sm90.name = "sm90";
  sm90.plan_forward = plan_forward<plan::plan_forward_sm90>;
  sm90.plan_backward = plan_backward<plan::plan_backward_sm90>;
  Backend& sm80 = table.backends[kSm80];
  sm80.name = "sm80";
  sm80.plan_forward = plan_forward<plan::plan_forward_sm80>;
  sm80.plan_backward = plan_backward<plan::plan_backward_sm80>;
  Backend& cpu = table.backends[kCpu];
  cpu.name = "cpu";
  cpu.plan_forward = plan_forward<plan::plan_forward_cpu>;
  cpu.plan_backward = plan_backward<plan::plan_backward_cpu>;
  table.plan_tangents = plan::plan_tangents;
  table.free_forward = [](const plan::ForwardPlan* plan) { delete plan; };
  table.free_backward = [](const plan::BackwardPlan* plan) { delete plan; };
  table.describe_forward = describe<plan::ForwardPlan>;
  table.describe_backward = describe<plan::BackwardPlan>;
  table.describe_tangents = describe<plan::TangentPlan>;
  table.report_forward = report<plan::ForwardPlan>;
  table.report_backward = report<plan::BackwardPlan>;
}

void add_cpu_kernels(Kernels& table) {
  Backend& row = table.backends[kCpu];
  row.append = cpu_append;
  row.forward = cpu_forward;
  row.backward = cpu_backward;
  row.delta = cpu_delta;
}

Kernels make_table() {
  Kernels table{};
  table.code_for = [](int major, int minor, const char* archs) { return code_for(major, minor, archs); };
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
  static const flash_attn_ext::library::Kernels table = [&] {
    flash_attn_ext::cpu::set_services(*services);
    return flash_attn_ext::library::make_table();
  }();
  return &table;
}
