#include "host/backends.h"

#include <algorithm>
#include <sstream>

#include "host/allocate.h"
#include "host/checks.h"
#include "host/make_params.h"
#include "kernels/cpu/cpu_kernels.h"

#if FLASH_ATTN_EXT_WITH_CUDA
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "kernels/sm80/sm80_backend.h"
#include "kernels/sm80/sm80_kernels.h"
#endif

namespace flash_attn_ext::host {
namespace {

std::vector<std::string> cpu_unsupported_reasons(const attention::AttentionParams&, at::Device device) {
  if (device.is_cpu()) return {};
  return {"it reads CPU memory, and the tensors are on " + device.str() + "; move them with .cpu()"};
}

void cpu_backward(const attention::BackwardParams& params) {
  // Gradients that are sums of dS over rows cancel; what a rounded out leaves in delta does not.
  const bool rounded_out =
      params.element == attention::ElementType::kBFloat16 || params.element == attention::ElementType::kFloat16;
  const bool sums_over_rows = params.dbias.present() || params.dalibi_slopes || params.dsink;
  if (rounded_out && sums_over_rows) cpu::backward_delta(params);
  if (params.dk.data || params.dv.data || params.dalibi_slopes) cpu::backward_dkdv(params);
  if (params.dq.data) cpu::backward_dq(params);
  if (params.dbias.present()) cpu::backward_dbias(params);
  if (params.dsink) cpu::backward_dsink(params);
}

bool cpu_readable(const at::Tensor&) { return true; }

#if FLASH_ATTN_EXT_WITH_CUDA
std::vector<std::string> sm80_unsupported_reasons(const attention::AttentionParams& params, at::Device device) {
  if (!device.is_cuda()) return {"it reads GPU memory, and the tensors are on " + device.str()};
  std::vector<std::string> reasons;
  const cudaDeviceProp* properties = at::cuda::getDeviceProperties(device.index());
  if (properties->major < 8) {
    reasons.push_back(std::string("it needs compute capability 8.0 or later, and ") + properties->name + " has " +
                      std::to_string(properties->major) + "." + std::to_string(properties->minor));
  }
  if (params.element != attention::ElementType::kBFloat16 && params.element != attention::ElementType::kFloat16) {
    reasons.push_back("it takes bfloat16 and float16; cast q, k and v");
  }
  const int64_t head_dim = std::max(params.head_dim_qk, params.head_dim_v);
  if (head_dim > sm80::kMaxHeadDim) {
    reasons.push_back("it takes head dims up to " + std::to_string(sm80::kMaxHeadDim) + ", got " +
                      std::to_string(head_dim));
  }
  return reasons;
}

// Rows of contiguous 16-bit elements that begin at multiples of 16 bytes.
bool sm80_readable(const at::Tensor& operand) {
  const int64_t alignment = 16 / operand.element_size();
  if (operand.stride(-1) != 1 && operand.size(-1) != 1) return false;
  if (reinterpret_cast<uintptr_t>(operand.data_ptr()) % 16 != 0) return false;
  for (int64_t d = 0; d + 1 < operand.dim(); ++d) {
    if (operand.size(d) != 1 && operand.stride(d) % alignment != 0) return false;
  }
  return true;
}

void sm80_forward(const attention::ForwardParams& params) {
  C10_CUDA_CHECK(sm80::run_forward(params, c10::cuda::getCurrentCUDAStream()));
}

void sm80_backward(const attention::BackwardParams& params) {
  C10_CUDA_CHECK(sm80::run_backward(params, c10::cuda::getCurrentCUDAStream()));
}
#endif

std::vector<std::string> reasons_against(const Backend& backend, const AttentionInputs& inputs,
                                         const attention::AttentionParams& params) {
  std::vector<std::string> reasons = backend.unsupported_reasons(params, inputs.q.device());
  if (inputs.backend && *inputs.backend != backend.name) {
    reasons.push_back("the call asked for backend='" + *inputs.backend + "'");
  }
  return reasons;
}

void check_backend_name(const AttentionInputs& inputs) {
  if (!inputs.backend) return;
  std::ostringstream names;
  for (const Backend& backend : backends()) {
    if (*inputs.backend == backend.name) return;
    names << (names.tellp() > 0 ? ", " : "") << "'" << backend.name << "'";
  }
  TORCH_CHECK_VALUE(false, "backend is '", *inputs.backend, "', expected one of ", names.str(),
                    " or None for the first that can run");
}

}  // namespace

const std::vector<Backend>& backends() {
  static const std::vector<Backend> table = {
#if FLASH_ATTN_EXT_WITH_CUDA
    {.name = "sm80",
     .unsupported_reasons = sm80_unsupported_reasons,
     .readable = sm80_readable,
     .num_alibi_partials = sm80::num_alibi_partials,
     .forward = sm80_forward,
     .backward = sm80_backward},
#endif
    {.name = "cpu",
     .unsupported_reasons = cpu_unsupported_reasons,
     .readable = cpu_readable,
     .num_alibi_partials = nullptr,
     .forward = cpu::forward,
     .backward = cpu_backward},
  };
  return table;
}

std::vector<Verdict> explain(const AttentionInputs& inputs) {
  check_inputs(inputs);
  check_backend_name(inputs);
  const attention::AttentionParams params = make_attention_params(inputs);
  std::vector<Verdict> verdicts;
  for (const Backend& backend : backends()) {
    verdicts.emplace_back(backend.name, reasons_against(backend, inputs, params));
  }
  return verdicts;
}

const Backend& choose_backend(const AttentionInputs& inputs, const attention::AttentionParams& params) {
  check_backend_name(inputs);
  for (const Backend& backend : backends()) {
    if (reasons_against(backend, inputs, params).empty()) return backend;
  }
  std::ostringstream message;
  message << "no backend can run this call:";
  for (const Backend& backend : backends()) {
    message << "\n  " << backend.name << ":";
    for (const std::string& reason : reasons_against(backend, inputs, params)) message << " " << reason << ".";
  }
  TORCH_CHECK(false, message.str());
}

at::Tensor readable(const Backend& backend, const at::Tensor& operand) {
  return backend.readable(operand) ? operand : copy_with_aligned_rows(operand);
}

AttentionInputs readable_inputs(const Backend& backend, AttentionInputs inputs) {
  for (at::Tensor* operand : {&inputs.q, &inputs.k, &inputs.v}) *operand = readable(backend, *operand);
  // A few numbers a head or sequence, which every kernel reads as an array.
  for (std::optional<at::Tensor>* vector : {&inputs.sink, &inputs.cu_seqlens_q, &inputs.cu_seqlens_k}) {
    if (*vector) *vector = (*vector)->contiguous();
  }
  return inputs;
}

}  // namespace flash_attn_ext::host
