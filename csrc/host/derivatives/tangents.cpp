#include "host/derivatives/tangents.h"

#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include "host/backends.h"
#include "host/checks/checks.h"
#include "host/checks/tensor_checks.h"
#include "host/library/library.h"
#include "host/library/limits.h"
#include "host/make_params.h"
#include "host/memory/allocate.h"
#include "host/memory/readable.h"
#include "host/report/range.h"

namespace flash_attn_ext::host {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

void check_tensor(const char* name, const OptionalTensor& tensor, at::IntArrayRef sizes, at::ScalarType dtype,
                  const at::Tensor& q) {
  if (!tensor) return;
  check_holds_memory(name, tensor);
  check_device(name, *tensor, q);
  TORCH_CHECK(tensor->sizes() == sizes, name, " has shape ", tensor->sizes(), ", expected ", sizes);
  TORCH_CHECK(tensor->scalar_type() == dtype, name, " has dtype ", dtype_name(tensor->scalar_type()), ", expected ",
              dtype_name(dtype), "; cast with ", name, ".to(torch.", dtype_name(dtype), ")");
}

void check_tangents(const AttentionInputs& in, const TangentInputs& tangents) {
  const at::ScalarType dtype = in.q.scalar_type();
  at::DimVector out_sizes(in.q.sizes());
  out_sizes.back() = in.head_dim_v();
  check_tensor("out", tangents.out, out_sizes, dtype, in.q);
  check_tensor("lse", tangents.lse, in.lse_sizes(), in.accumulate_type(), in.q);
  check_tensor("q_tangent", tangents.q_tangent, in.q.sizes(), dtype, in.q);
  check_tensor("k_tangent", tangents.k_tangent, in.k.sizes(), dtype, in.q);
  check_tensor("v_tangent", tangents.v_tangent, in.v.sizes(), dtype, in.q);
  TORCH_CHECK(!tangents.sink_tangent || in.sink, "sink_tangent is given, but the call has no sink; leave it out");
  if (in.sink) check_tensor("sink_tangent", tangents.sink_tangent, in.sink->sizes(), in.accumulate_type(), in.q);
}

// Everything that is read, in a form that kernels can read.
struct Readable {
  InputCopies inputs;
  OptionalTensor q_tangent, k_tangent, v_tangent, sink_tangent;
  at::Tensor lse;
};

Readable make_readable(const Backend& backend, const AttentionInputs& in, const TangentInputs& tangents,
                       attention::TangentParams& params) {
  Readable readable;
  readable.inputs = make_readable(backend, in, params);
  const auto matrix = [&](const char* name, const OptionalTensor& tangent, OptionalTensor& kept) {
    if (tangent) kept = readable_matrix(backend, name, *tangent);
    return kept ? matrix_view(*kept) : attention::MatrixView{};
  };
  params.q_tangent = matrix("q_tangent", tangents.q_tangent, readable.q_tangent);
  params.k_tangent = matrix("k_tangent", tangents.k_tangent, readable.k_tangent);
  params.v_tangent = matrix("v_tangent", tangents.v_tangent, readable.v_tangent);
  readable.lse = readable_array("lse", tangents.lse);
  params.lse = statistic_view(readable.lse);
  params.out = matrix_view(tangents.out);
  if (tangents.sink_tangent) {
    readable.sink_tangent = readable_array("sink_tangent", *tangents.sink_tangent);
    params.sink_tangent = readable.sink_tangent->const_data_ptr();
  }
  return readable;
}

}  // namespace

std::optional<std::array<at::Tensor, 2>> attention_tangents(const AttentionInputs& in, const TangentInputs& tangents) {
  if (!has_gpu_kernels() || !in.q.is_cuda() || !in.has_heads()) return std::nullopt;
  check_in_memory(in);
  check_inputs(in);
  check_tangents(in, tangents);
  const c10::OptionalDeviceGuard device_guard(in.q.device());
  attention::TangentParams params;
  static_cast<attention::AttentionParams&>(params) = make_attention_params(in);
  const plan::TangentPlan plan = kernels().plan_tangents(params, limits_of(in.q.device()));
  if (!plan.has_kernel) return std::nullopt;
  const Backend& backend = choose_backend(in, params);
  const Readable readable = make_readable(backend, in, tangents, params);
  const std::array results = {empty_in_stride_order(tangents.out, tangents.out.sizes()),
                              empty(in.lse_sizes(), in.accumulate_type(), in.q.device())};
  params.out_tangent = written_matrix_view(results[0]);
  params.lse_tangent = written_statistic_view(results[1]);
  RECORD_FUNCTION(range_name("tangents", backend.name, text_of(kernels().describe_tangents, plan)),
                  c10::ArrayRef<const c10::IValue>{});
  launch(in.q.device(), [&](void* stream) { return kernels().gpu.tangents(params, plan, stream); });
  return results;
}

}  // namespace flash_attn_ext::host
