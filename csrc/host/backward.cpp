#include <c10/core/DeviceGuard.h>

#include "host/allocate.h"
#include "host/attention.h"
#include "host/backends.h"
#include "host/checks.h"
#include "host/make_params.h"

namespace flash_attn_ext::host {
namespace {

enum Gradient { kDq, kDk, kDv, kDbias, kDalibiSlopes, kDsink, kNumGradients };

attention::BiasGradient bias_gradient(const at::Tensor& gradient) {
  if (!gradient.defined()) return {};
  const auto split = [&](int64_t d) { return gradient.size(d) != 1; };
  const auto stride = [&](int64_t d) { return split(d) ? gradient.stride(d) : int64_t{0}; };
  return {.data = gradient.data_ptr(),
          .per_batch = split(0),
          .per_head = split(1),
          .per_query = split(2),
          .per_key = split(3),
          .batch_stride = stride(0),
          .head_stride = stride(1),
          .query_stride = stride(2),
          .key_stride = stride(3)};
}

// The gradients in the accumulate type and shape that kernels write; undefined where not asked for.
struct Gradients {
  at::Tensor dq, dk, dv;
  at::Tensor dbias;          // bias's shape, starts at zero
  at::Tensor dalibi_slopes;  // (batch, heads)
  at::Tensor dsink;          // (heads,)
};

Gradients allocate_gradients(const AttentionInputs& in, const std::array<bool, kNumGradients>& wanted) {
  const at::TensorOptions accumulate = in.q.options().dtype(in.accumulate_type());
  Gradients g;
  if (wanted[kDq]) g.dq = empty_in_stride_order(in.q, in.q.sizes());
  if (wanted[kDk]) g.dk = empty_in_stride_order(in.k, in.k.sizes());
  if (wanted[kDv]) g.dv = empty_in_stride_order(in.v, in.v.sizes());
  if (wanted[kDbias]) g.dbias = at::zeros(in.bias->sizes(), accumulate);
  if (wanted[kDalibiSlopes]) g.dalibi_slopes = at::zeros({in.batch(), in.num_heads_q()}, accumulate);
  if (wanted[kDsink]) g.dsink = at::zeros({in.num_heads_q()}, accumulate);
  return g;
}

attention::BackwardParams make_backward_params(const AttentionInputs& in, const at::Tensor& dout, const Gradients& g) {
  attention::BackwardParams params;
  static_cast<attention::AttentionParams&>(params) = make_attention_params(in);
  params.dout = matrix_view(dout);
  params.dq = matrix_view(g.dq);
  params.dk = matrix_view(g.dk);
  params.dv = matrix_view(g.dv);
  params.dbias = bias_gradient(g.dbias);
  params.dalibi_slopes = g.dalibi_slopes.defined() ? g.dalibi_slopes.data_ptr() : nullptr;
  params.dsink = g.dsink.defined() ? g.dsink.data_ptr() : nullptr;
  return params;
}

// Room for the partial sums of a backend that adds up the slopes' gradient in a second step.
at::Tensor alibi_partials(const Backend& backend, const attention::BackwardParams& params,
                          const at::TensorOptions& options) {
  if (params.dalibi_slopes == nullptr || backend.num_alibi_partials == nullptr) return {};
  return at::zeros({params.batch, params.num_heads_q, backend.num_alibi_partials(params)}, options);
}

// Kernel gradients in the shapes and dtypes of the inputs.
std::vector<at::Tensor> finish(const AttentionInputs& in, Gradients g) {
  if (g.dbias.defined()) g.dbias = g.dbias.to(in.bias->scalar_type());
  if (g.dalibi_slopes.defined() && in.alibi_slopes->dim() == 1) g.dalibi_slopes = g.dalibi_slopes.sum(0);
  std::vector<at::Tensor> gradients = {g.dq, g.dk, g.dv, g.dbias, g.dalibi_slopes, g.dsink};
  for (at::Tensor& gradient : gradients) {
    if (!gradient.defined()) gradient = at::empty({0}, in.q.options());
  }
  return gradients;
}

}  // namespace

std::vector<at::Tensor> attention_backward(const AttentionInputs& given, const BackwardInputs& backward) {
  check_inputs(given);
  check_backward_inputs(given, backward);
  const c10::OptionalDeviceGuard guard(given.q.device());
  const Backend& backend = choose_backend(given, make_attention_params(given));
  Gradients gradients = allocate_gradients(given, backward.output_mask);
  if (given.batch() > 0 && given.num_heads_q() > 0) {
    const AttentionInputs in = readable_inputs(backend, given);
    const at::Tensor dout = readable(backend, backward.dout);
    const at::Tensor lse = backward.lse.contiguous();
    const at::Tensor residual = backward.lse_residual.contiguous();
    const at::Tensor delta = compute_delta(backward.out, backward.dout, backward.dlse);
    attention::BackwardParams params = make_backward_params(in, dout, gradients);
    params.lse = statistic_view(lse);
    params.lse_residual = statistic_view(residual);
    params.delta = statistic_view(delta);
    const at::Tensor dlse = backward.dlse ? backward.dlse->to(in.accumulate_type()).contiguous() : at::Tensor();
    params.dlse = statistic_view(dlse);
    const at::Tensor partials = alibi_partials(backend, params, delta.options());
    params.alibi_partials = partials.defined() ? partials.data_ptr<float>() : nullptr;
    params.alibi_partials_per_head = partials.defined() ? partials.size(-1) : 0;
    backend.backward(params);
  }
  return finish(given, std::move(gradients));
}

}  // namespace flash_attn_ext::host
