#include "host/aten/kernels.h"

#include <ATen/Context.h>
#include <ATen/ops/constant_pad_nd.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <limits>
#include <string>
#include <utility>

#include "host/aten/layouts.h"
#include "host/attention.h"
#include "host/call/autograd.h"
#include "host/call/operators.h"
#include "host/checks/tensor_checks.h"
#include "host/memory/allocate.h"

namespace flash_attn_ext::host {
namespace {

using Arguments = c10::ArrayRef<c10::IValue>;
using MaybeResults = std::optional<Results>;

// The number of rows in an LSE of efficient attention is a multiple of this.
constexpr int64_t kEfficientLseMultiple = 32;
constexpr std::array<bool, 6> kQkv = {true, true, true, false, false, false};

// Whether a tensor is neither None nor the undefined one that stands for None in schemas without optional tensors.
bool is_given(const c10::IValue& tensor) { return !tensor.isNone() && tensor.toTensor().defined(); }

// v has to be as wide as q where results take the strides of q.
bool have_equal_widths(const AttentionInputs& in) {
  return in.q.dim() == 4 && in.v.dim() == 4 && in.q.size(3) == in.v.size(3);
}

AttentionInputs problem_of(Arguments qkv, const char* causality, const c10::IValue& scale) {
  AttentionInputs in;
  in.q = qkv[0].toTensor();
  in.k = qkv[1].toTensor();
  in.v = qkv[2].toTensor();
  in.scale = scale.toOptional<double>();
  if (causality != nullptr) in.causal = causality;
  return in;
}

std::vector<at::Tensor> gradients_of(const AttentionInputs& in, const at::Tensor& dout, const at::Tensor& out,
                                     const at::Tensor& lse) {
  return attention_backward(
      in,
      {.dout = dout, .dlse = std::nullopt, .out = out, .lse = lse, .lse_residual = std::nullopt, .output_mask = kQkv});
}

// A placeholder for the state of a generator that was not used. It is new for each call, because CUDA graphs want
// outputs in their own memory pool.
at::Tensor unused_state(const at::Tensor& q, at::ScalarType dtype, c10::IntArrayRef sizes) {
  return empty(sizes, dtype, q.device());
}

Results like_qkv(const AttentionInputs& in, const std::vector<at::Tensor>& gradients) {
  return {as_like(gradients[0], in.q), as_like(gradients[1], in.k), as_like(gradients[2], in.v)};
}

// (query, key, value, dropout_p, is_causal, attn_mask, scale)
MaybeResults cpu_flash(Arguments a) {
  if (a[3].toDouble() != 0 || is_given(a[5])) return std::nullopt;
  const AttentionInputs in = problem_of(a, a[4].toBool() ? "top_left" : nullptr, a[6]);
  if (!have_equal_widths(in)) return std::nullopt;
  const ForwardOutputs outputs = attention_forward(in, /*wants_lse=*/true);
  return Results{as_like(outputs.out, in.q), sequence_first(outputs.lse)};
}

// (grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, attn_mask, scale)
MaybeResults cpu_flash_backward(Arguments a) {
  if (a[6].toDouble() != 0 || is_given(a[8])) return std::nullopt;
  const AttentionInputs in = problem_of(a.slice(1), a[7].toBool() ? "top_left" : nullptr, a[9]);
  const auto gradients = gradients_of(in, a[0].toTensor(), a[4].toTensor(), a[5].toTensor());
  return Results{sequence_first(gradients[0]), sequence_first(gradients[1]), sequence_first(gradients[2])};
}

// (query, key, value, dropout_p, is_causal, return_debug_mask, scale)
MaybeResults flash(Arguments a) {
  if (a[3].toDouble() != 0 || a[5].toBool()) return std::nullopt;
  const AttentionInputs in = problem_of(a, a[4].toBool() ? "bottom_right" : nullptr, a[6]);
  if (!have_equal_widths(in)) return std::nullopt;
  const c10::OptionalDeviceGuard guard(in.q.device());
  const ForwardOutputs outputs = attention_forward(in, /*wants_lse=*/true);
  const at::Tensor none;
  return Results{as_like(outputs.out, in.q),
                 outputs.lse,
                 none,
                 none,
                 in.q.size(2),
                 in.k.size(2),
                 unused_state(in.q, at::kUInt64, {2}),
                 unused_state(in.q, at::kUInt64, {}),
                 empty({0}, in.q.scalar_type(), in.q.device())};
}

// (grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed,
// philox_offset, scale)
MaybeResults flash_backward(Arguments a) {
  if (a[10].toDouble() != 0) return std::nullopt;
  const AttentionInputs in = problem_of(a.slice(1), a[11].toBool() ? "bottom_right" : nullptr, a[14]);
  return like_qkv(in, gradients_of(in, a[0].toTensor(), a[4].toTensor(), a[5].toTensor()));
}

// (query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, return_debug_mask, scale)
MaybeResults cudnn(Arguments a) {
  if (is_given(a[3]) || a[5].toDouble() != 0 || a[7].toBool()) return std::nullopt;
  const AttentionInputs in = problem_of(a, a[6].toBool() ? "top_left" : nullptr, a[8]);
  const c10::OptionalDeviceGuard guard(in.q.device());
  const ForwardOutputs outputs = attention_forward(in, /*wants_lse=*/true);
  const at::Tensor none;
  return Results{outputs.out,
                 outputs.lse.unsqueeze(-1),
                 none,
                 none,
                 in.q.size(2),
                 in.k.size(2),
                 unused_state(in.q, at::kLong, {}),
                 unused_state(in.q, at::kLong, {}),
                 none};
}

// (grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k, max_q,
// max_k, dropout_p, is_causal, scale)
MaybeResults cudnn_backward(Arguments a) {
  if (is_given(a[8]) || a[13].toDouble() != 0) return std::nullopt;
  const AttentionInputs in = problem_of(a.slice(1), a[14].toBool() ? "top_left" : nullptr, a[15]);
  return like_qkv(in, gradients_of(in, a[0].toTensor(), a[4].toTensor(), a[5].toTensor().squeeze(-1)));
}

// (query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, scale)
MaybeResults efficient(Arguments a) {
  if (is_given(a[3]) || a[5].toDouble() != 0) return std::nullopt;
  const AttentionInputs in = problem_of(a, a[6].toBool() ? "top_left" : nullptr, a[7]);
  const c10::OptionalDeviceGuard guard(in.q.device());
  const bool wants_lse = a[4].toBool();
  const ForwardOutputs outputs = attention_forward(in, wants_lse);
  at::Tensor lse = outputs.lse;
  if (!wants_lse) {
    lse = empty({in.q.size(0), in.q.size(1), 0}, in.accumulate_type(), in.q.device());
  } else if (const int64_t beyond = lse.size(2) % kEfficientLseMultiple; beyond != 0) {
    lse = at::constant_pad_nd(lse, {0, kEfficientLseMultiple - beyond}, std::numeric_limits<double>::infinity());
  }
  return Results{sequence_first(outputs.out), lse, unused_state(in.q, at::kLong, {}),
                 unused_state(in.q, at::kLong, {})};
}

// (grad_out_, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset, dropout_p, grad_input_mask,
// is_causal, scale)
MaybeResults efficient_backward(Arguments a) {
  if (is_given(a[4]) || a[9].toDouble() != 0) return std::nullopt;
  const AttentionInputs in = problem_of(a.slice(1), a[11].toBool() ? "top_left" : nullptr, a[12]);
  const at::Tensor lse = a[6].toTensor().narrow(2, 0, in.q.size(2));
  const auto gradients = gradients_of(in, a[0].toTensor(), a[5].toTensor(), lse);
  return Results{sequence_first(gradients[0]), sequence_first(gradients[1]), sequence_first(gradients[2]),
                 at::Tensor()};
}

// Whether only efficient attention takes q, by its device and dtype. It has no grouped heads.
bool is_for_efficient(const at::Tensor& q) { return q.is_cuda() && q.scalar_type() == at::kFloat; }

// Whether PyTorch would give a call without mask and dropout to a fused kernel, whichever it is: none of them is
// switched off, and all of them take q, k and v.
bool goes_to_fused_kernel(const AttentionInputs& in, bool enable_gqa) {
  constexpr int64_t kMostFusedHeadDim = 256;
  constexpr int64_t kHeadDimMultiple = 8;
  const at::Context& context = at::globalContext();
  const bool on_gpu = in.q.is_cuda();
  if (!on_gpu && !in.q.is_cpu()) return false;
  if (!context.userEnabledFlashSDP()) return false;
  if (on_gpu && !(context.userEnabledMemEfficientSDP() && context.userEnabledCuDNNSDP())) return false;
  if (in.q.numel() == 0 || in.k.numel() == 0 || in.q.scalar_type() == at::kDouble) return false;
  const bool may_group = enable_gqa && !is_for_efficient(in.q);
  return in.k.size(1) == in.v.size(1) && (may_group || in.q.size(1) == in.k.size(1)) &&
         in.q.size(3) <= kMostFusedHeadDim && in.q.size(3) % kHeadDimMultiple == 0;
}

// Whether kernels may read the memory of q, k and v, and no derivatives are needed but those of autograd's node.
bool are_plain(const AttentionInputs& in) {
  const auto is_plain = [](const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && !tensor.is_nested() && holds_memory(tensor);
  };
  return !is_watched() && !is_transformed() && is_plain(in.q) && is_plain(in.k) && is_plain(in.v);
}

// PyTorch's function itself, before it chooses an operator. (query, key, value, attn_mask, dropout_p, is_causal, scale,
// enable_gqa)
MaybeResults scaled_dot_product_attention(Arguments a) {
  if (is_given(a[3]) || a[4].toDouble() != 0) return std::nullopt;
  const AttentionInputs in = problem_of(a, a[5].toBool() ? "top_left" : nullptr, a[6]);
  if (!are_plain(in) || !have_equal_widths(in) || !goes_to_fused_kernel(in, a[7].toBool())) return std::nullopt;
  const bool below_autograd = c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradFunctionality);
  const at::Tensor out = (below_autograd ? attention_forward : attention)(in, /*wants_lse=*/false).out;
  return Results{is_for_efficient(in.q) ? sequence_first(out) : as_like(out, in.q)};
}

}  // namespace

const std::array<FrontKernel, 9>& front_kernels() {
  static constexpr std::array<FrontKernel, 9> kKernels = {{
      {"scaled_dot_product_attention", false, scaled_dot_product_attention},
      {"_scaled_dot_product_flash_attention_for_cpu", false, cpu_flash},
      {"_scaled_dot_product_flash_attention_for_cpu_backward", true, cpu_flash_backward},
      {"_scaled_dot_product_flash_attention", false, flash},
      {"_scaled_dot_product_flash_attention_backward", true, flash_backward},
      {"_scaled_dot_product_cudnn_attention", false, cudnn},
      {"_scaled_dot_product_cudnn_attention_backward", true, cudnn_backward},
      {"_scaled_dot_product_efficient_attention", false, efficient},
      {"_scaled_dot_product_efficient_attention_backward", true, efficient_backward},
  }};
  return kKernels;
}

}  // namespace flash_attn_ext::host
