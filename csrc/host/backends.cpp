#include "host/backends.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>
#include <utility>

#include "host/library/library.h"
#include "kernels/config/sm90_forward.h"

namespace flash_attn_ext::host {
namespace {

void cpu_reasons(const attention::AttentionParams&, at::Device device, Reasons& reasons) {
  if (device.is_cpu()) return;
  reasons.add(
      [&] { return "it reads CPU memory, and the tensors are on " + device.str() + "; move them with .cpu()"; });
}

bool cpu_readable(const at::Tensor&) { return true; }

std::string on_other_device(at::Device device) { return "it reads GPU memory, and the tensors are on " + device.str(); }

std::string on_other_gpu(const library::Gpu& gpu) {
  return std::string("it needs compute capability 9.x (Hopper), and ") + gpu.name + " has " +
         std::to_string(gpu.major) + "." + std::to_string(gpu.minor);
}

// The GPU of a device, or nullptr and a reason.
const library::Gpu* find_gpu(at::Device device, Reasons& reasons) {
  if (!device.is_cuda()) {
    reasons.add([&] { return on_other_device(device); });
    return nullptr;
  }
  const library::Gpu& gpu = kernels().gpu.gpu(device.index());
  if (gpu.status == 0) return &gpu;
  reasons.add([&] {
    return std::string("the kernels' CUDA runtime, ") + library_facts().cuda_version + ", cannot use " + device.str() +
           ": " + kernels().gpu.take_error(gpu.status);
  });
  return nullptr;
}

void add_reason_of_fast_build(const attention::AttentionParams& params, Reasons& reasons) {
  const int64_t largest = library_facts().fast_build_head_dim;
  if (largest == 0) return;
  const int64_t head_dim = std::max(params.head_dim_qk, params.head_dim_v);
  if (params.element == attention::ElementType::kBFloat16 && head_dim <= largest) return;
  reasons.add([&] {
    return "this library was built with FLASH_ATTN_EXT_FAST_BUILD=1, and has only bfloat16 with head dims up to " +
           std::to_string(largest) + " for GPUs";
  });
}

void sm80_reasons(const attention::AttentionParams& params, at::Device device, Reasons& reasons) {
  const library::Gpu* gpu = find_gpu(device, reasons);
  if (gpu == nullptr) return;
  add_reason_of_fast_build(params, reasons);
  if (!gpu->has_code) reasons.add([&] { return why_no_code(*gpu); });
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
  const library::Gpu* gpu = find_gpu(device, reasons);
  if (gpu == nullptr) return;
  add_reason_of_fast_build(params, reasons);
  if (gpu->major != 9) reasons.add([&] { return on_other_gpu(*gpu); });
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
  static const std::vector<Backend> table = [] {
    const Backend known[] = {
        {"sm90", /*on_gpu=*/true, sm90_reasons, sm80_readable, nullptr},
        {"sm80", /*on_gpu=*/true, sm80_reasons, sm80_readable, nullptr},
        {"cpu", /*on_gpu=*/false, cpu_reasons, cpu_readable, nullptr},
    };
    std::vector<Backend> built;
    for (const library::Backend& compiled : kernels().backends) {
      for (Backend backend : known) {
        if (compiled.forward == nullptr || std::string(backend.name) != compiled.name) continue;
        backend.compiled = &compiled;
        built.push_back(backend);
      }
    }
    return built;
  }();
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
