#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include "attention/params.h"
#include "host/attention.h"
#include "host/backends.h"
#include "host/checks/checks.h"
#include "host/make_params.h"
#include "host/memory/readable.h"

namespace flash_attn_ext::host {
namespace {

void run_delta(const attention::DeltaParams& params, at::Device device) {
  const c10::OptionalDeviceGuard guard(device);
  for (const Backend& backend : backends()) {
    if (backend.on_gpu ? device.is_cuda() : device.is_cpu()) return backend.delta(params, device);
  }
  TORCH_CHECK(false, "out is on ", device, ", which this build has no delta kernel for; move the tensors to the CPU");
}

at::Tensor empty_delta(const at::Tensor& out) {
  const at::ScalarType accumulate = out.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::TensorOptions options = out.options().dtype(accumulate);
  return out.dim() == 3 ? at::empty({out.size(1), out.size(0)}, options)
                        : at::empty({out.size(0), out.size(1), out.size(2)}, options);
}

}  // namespace

at::Tensor compute_delta(const at::Tensor& out, const at::Tensor& dout, const std::optional<at::Tensor>& dlse) {
  check_delta_inputs(out, dout, dlse);
  const bool packed = out.dim() == 3;
  const at::Tensor result = empty_delta(out);
  const at::Tensor dlse_rows = dlse ? readable_array("dlse", dlse->to(result.scalar_type())) : at::Tensor();
  if (result.numel() == 0) return result;
  run_delta({.element = element_type(out.scalar_type()),
             .batch = packed ? 1 : out.size(0),
             .num_heads = out.size(1),
             .rows = out.size(packed ? 0 : 2),
             .head_dim = out.size(-1),
             .out = matrix_view(out),
             .dout = matrix_view(dout),
             .dlse = statistic_view(dlse_rows),
             .delta = written_statistic_view(result)},
            out.device());
  return result;
}

}  // namespace flash_attn_ext::host
