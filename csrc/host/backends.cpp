#include "host/backends.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>
#include <utility>

#include "kernels/config/sm90_forward.h"
#include "kernels/cpu/cpu_kernels.h"

#if FLASH_ATTN_EXT_WITH_CUDA
#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "kernels/common/cache/append_kv.h"
#include "kernels/sm80/sm80_backend.h"
#endif
#if FLASH_ATTN_EXT_WITH_SM90
#include "kernels/sm90/sm90_backend.h"
#endif

namespace flash_attn_ext::host {
namespace {

void cpu_reasons(const attention::AttentionParams&, at::Device device, Reasons& reasons) {
  if (device.is_cpu()) return;
  reasons.add(
      [&] { return "it reads CPU memory, and the tensors are on " + device.str() + "; move them with .cpu()"; });
}

void cpu_forward(const attention::AppendingForwardParams& params, const plan::ForwardPlan& plan, void*) {
  if (params.append.present()) cpu::append_kv(params.append);
  cpu::forward(params, plan.keys_per_split);
}

void cpu_backward(const attention::BackwardParams& given, const plan::BackwardPlan& plan, void* workspace) {
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

bool cpu_readable(const at::Tensor&) { return true; }

#if FLASH_ATTN_EXT_WITH_CUDA
std::string on_other_device(at::Device device) { return "it reads GPU memory, and the tensors are on " + device.str(); }

// `needed`: which compute capability, in words.
std::string on_other_gpu(const cudaDeviceProp& properties, const char* needed) {
  return std::string("it needs compute capability ") + needed + ", and " + properties.name + " has " +
         std::to_string(properties.major) + "." + std::to_string(properties.minor);
}

void sm80_reasons(const attention::AttentionParams& params, at::Device device, Reasons& reasons) {
  if (!device.is_cuda()) return reasons.add([&] { return on_other_device(device); });
  const cudaDeviceProp& properties = *at::cuda::getDeviceProperties(device.index());
  if (properties.major < 8) reasons.add([&] { return on_other_gpu(properties, "8.0 or later"); });
  const int64_t head_dim = std::max(params.head_dim_qk, params.head_dim_v);
  const int64_t largest = plan::max_head_dim_sm80(params.element);
  if (head_dim > largest) {
    reasons.add([&] {
      return "it takes head dims up to " + std::to_string(largest) + " in this dtype, got " + std::to_string(head_dim) +
             "; bfloat16 and float16 may have " +
             std::to_string(plan::max_head_dim_sm80(attention::ElementType::kBFloat16));
    });
  }
}

// Kernels read rows of contiguous elements that begin at multiples of 16 bytes. Those of float64 read any strides.
bool sm80_readable(const at::Tensor& operand) {
  if (operand.scalar_type() == at::kDouble) return true;
  const at::IntArrayRef sizes = operand.sizes(), strides = operand.strides();
  if (strides.back() != 1 && sizes.back() != 1) return false;
  if (reinterpret_cast<uintptr_t>(operand.const_data_ptr()) % 16 != 0) return false;
  const auto element_bytes = static_cast<int64_t>(operand.element_size());
  for (size_t d = 0; d + 1 < sizes.size(); ++d) {
    if (sizes[d] != 1 && strides[d] * element_bytes % 16 != 0) return false;
  }
  return true;
}

void gpu_append(const attention::AppendParams& params) {
  C10_CUDA_CHECK(common::append_kv(params, c10::cuda::getCurrentCUDAStream()));
}

void sm80_forward(const attention::AppendingForwardParams& params, const plan::ForwardPlan& plan, void* workspace) {
  C10_CUDA_CHECK(sm80::run_forward(params, plan, workspace, c10::cuda::getCurrentCUDAStream()));
}

void sm80_backward(const attention::BackwardParams& params, const plan::BackwardPlan& plan, void* workspace) {
  C10_CUDA_CHECK(sm80::run_backward(params, plan, workspace, c10::cuda::getCurrentCUDAStream()));
}
#endif

#if FLASH_ATTN_EXT_WITH_SM90
// A TMA descriptor can describe strides that are multiples of 16 bytes, and for rows only strides other than 0.
void add_stride_reasons(Reasons& reasons, const char* name, const attention::MatrixView& view, int64_t rows) {
  constexpr int64_t kLongestStride = int64_t{1} << 38;  // elements of 2 bytes; TMA takes less than 2^40 bytes
  if (rows > 1 && view.row_stride == 0) {
    reasons.add([&] { return std::string("it cannot read ") + name + ", whose rows are one row repeated (stride 0)"; });
  }
  if (std::max({view.batch_stride, view.head_stride, view.row_stride}) > kLongestStride) {
    reasons.add([&] { return std::string("it cannot read ") + name + ", which has a stride of 2^39 bytes or more"; });
  }
}

void sm90_reasons(const attention::AttentionParams& params, at::Device device, Reasons& reasons) {
  if (!device.is_cuda()) return reasons.add([&] { return on_other_device(device); });
  const cudaDeviceProp& properties = *at::cuda::getDeviceProperties(device.index());
  if (properties.major != 9) reasons.add([&] { return on_other_gpu(properties, "9.x (Hopper)"); });
  if (!attention::is_16_bit(params.element)) {
    reasons.add([] { return std::string("it takes bfloat16 and float16 only"); });
  }
  if (params.head_dim_qk > sm90::kLargestHeadDimQk || params.head_dim_v > sm90::kLargestHeadDimV) {
    reasons.add([&] {
      return "it takes head dims up to " + std::to_string(sm90::kLargestHeadDimQk) + " of q and k and " +
             std::to_string(sm90::kLargestHeadDimV) + " of v, got " + std::to_string(params.head_dim_qk) + " and " +
             std::to_string(params.head_dim_v);
    });
  }
  const attention::SequenceTable& lengths = params.sequences;
  const bool packed = lengths.cu_seqlens_q != nullptr;
  add_stride_reasons(reasons, "q", params.q, packed ? lengths.total_q : lengths.max_seqlen_q);
  add_stride_reasons(reasons, "k", params.k, packed ? lengths.total_k : lengths.max_seqlen_k);
  add_stride_reasons(reasons, "v", params.v, packed ? lengths.total_k : lengths.max_seqlen_k);
}

void sm90_forward(const attention::AppendingForwardParams& params, const plan::ForwardPlan& plan, void* workspace) {
  if (!plan.is_warp_specialised()) return sm80_forward(params, plan, workspace);
  C10_CUDA_CHECK(sm90::run_forward(params, plan, workspace, c10::cuda::getCurrentCUDAStream()));
}

void sm90_backward(const attention::BackwardParams& params, const plan::BackwardPlan& plan, void* workspace) {
  if (!plan.is_warp_specialised()) return sm80_backward(params, plan, workspace);
  C10_CUDA_CHECK(sm90::run_backward(params, plan, workspace, c10::cuda::getCurrentCUDAStream()));
}
#endif

bool may_use(const Backend& backend, const AttentionInputs& inputs) {
  return !inputs.backend || *inputs.backend == backend.name;
}

bool can_run(const Backend& backend, const AttentionInputs& inputs, const attention::AttentionParams& params) {
  if (!may_use(backend, inputs)) return false;
  Reasons reasons(Reasons::Wanted::kWhetherAny);
  backend.find_reasons_against(params, inputs.q.device(), reasons);
  return !reasons.any();
}

}  // namespace

std::vector<std::string> reasons_against(const Backend& backend, const AttentionInputs& inputs,
                                         const attention::AttentionParams& params) {
  Reasons reasons(Reasons::Wanted::kSentences);
  backend.find_reasons_against(params, inputs.q.device(), reasons);
  if (!may_use(backend, inputs)) {
    reasons.add([&] { return "the call asked for backend='" + *inputs.backend + "'"; });
  }
  return std::move(reasons).sentences();
}

const std::vector<Backend>& backends() {
  static const std::vector<Backend> table = {
#if FLASH_ATTN_EXT_WITH_SM90
    {.name = "sm90",
     .find_reasons_against = sm90_reasons,
     .readable = sm80_readable,
     .append = gpu_append,
     .plan_forward = plan::plan_forward_sm90,
     .plan_backward = plan::plan_backward_sm90,
     .forward = sm90_forward,
     .backward = sm90_backward},
#endif
#if FLASH_ATTN_EXT_WITH_CUDA
    {.name = "sm80",
     .find_reasons_against = sm80_reasons,
     .readable = sm80_readable,
     .append = gpu_append,
     .plan_forward = plan::plan_forward_sm80,
     .plan_backward = plan::plan_backward_sm80,
     .forward = sm80_forward,
     .backward = sm80_backward},
#endif
    {.name = "cpu",
     .find_reasons_against = cpu_reasons,
     .readable = cpu_readable,
     .append = cpu::append_kv,
     .plan_forward = plan::plan_forward_cpu,
     .plan_backward = plan::plan_backward_cpu,
     .forward = cpu_forward,
     .backward = cpu_backward},
  };
  return table;
}

const Backend& backend_named(const std::string& name) {
  for (const Backend& backend : backends()) {
    if (name == backend.name) return backend;
  }
  std::ostringstream names;
  for (const Backend& backend : backends()) names << (names.tellp() > 0 ? ", " : "") << "'" << backend.name << "'";
  TORCH_CHECK_VALUE(false, "backend is '", name, "', expected one of ", names.str(),
                    " or None for the first that can run");
}

const Backend& choose_backend(const AttentionInputs& inputs, const attention::AttentionParams& params) {
  for (const Backend& backend : backends()) {
    if (can_run(backend, inputs, params)) return backend;
  }
  if (inputs.backend) backend_named(*inputs.backend);
  std::ostringstream message;
  message << "no backend can run this call:";
  for (const Backend& backend : backends()) {
    const char* before = ": ";
    message << "\n  " << backend.name;
    for (const std::string& reason : reasons_against(backend, inputs, params)) {
      message << std::exchange(before, "; ") << reason;
    }
  }
  TORCH_CHECK(false, message.str());
}

}  // namespace flash_attn_ext::host
