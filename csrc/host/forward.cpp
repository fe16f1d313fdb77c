#include <c10/core/DeviceGuard.h>

#include "host/allocate.h"
#include "host/attention.h"
#include "host/backends.h"
#include "host/checks.h"
#include "host/make_params.h"

namespace flash_attn_ext::host {
namespace {

std::vector<int64_t> with_last_dim(const at::Tensor& tensor, int64_t size) {
  std::vector<int64_t> sizes = tensor.sizes().vec();
  sizes.back() = size;
  return sizes;
}

}  // namespace

ForwardOutputs attention_forward(const AttentionInputs& given) {
  check_inputs(given);
  const c10::OptionalDeviceGuard guard(given.q.device());
  const Backend& backend = choose_backend(given, make_attention_params(given));
  const AttentionInputs in = readable_inputs(backend, given);
  const at::TensorOptions statistics = in.q.options().dtype(in.accumulate_type());
  ForwardOutputs outputs;
  outputs.out = empty_in_stride_order(given.q, with_last_dim(in.q, in.head_dim_v()));
  outputs.lse = in.packed() ? at::empty({in.num_heads_q(), in.q.size(0)}, statistics)
                            : at::empty({in.q.size(0), in.q.size(1), in.q.size(2)}, statistics);
  // Only an added bias moves scores so far from 0 that the LSE alone is too coarse for the gradients.
  outputs.lse_residual = in.bias ? at::empty_like(outputs.lse) : at::empty({0}, statistics);
  if (outputs.lse.numel() > 0) backend.forward(make_forward_params(in, outputs));
  return outputs;
}

}  // namespace flash_attn_ext::host
