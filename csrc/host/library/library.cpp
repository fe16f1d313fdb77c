#include "host/library/library.h"

#include <c10/util/Exception.h>

#include <cstring>
#include <new>
#include <string>

#include "host/library/cpu_services.h"

// Of PyTorch's C interface, torch/csrc/inductor/aoti_torch/c/shim.h, which declares it only where CUDA's headers are.
// Returns 0 or an error. Absent from a PyTorch without CUDA: this extension is the same for both.
extern "C" __attribute__((weak)) int32_t aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace flash_attn_ext::host {
namespace {

const library::Kernels* the_kernels = nullptr;

void check_status(library::Status status) {
  if (status == 0) return;
  if (status == library::kNoMemory) throw std::bad_alloc();
  const std::string error = the_kernels->gpu.take_error(status);
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, status,
                              "CUDA error: " + error +
                                  "\nIt may come from an earlier call, because kernels run asynchronously; with "
                                  "CUDA_LAUNCH_BLOCKING=1 they do not.");
}

void require_code(at::Device device) {
  if (!device.is_cuda()) return;
  TORCH_CHECK(has_gpu_kernels(), "tensors are on ", device, ", and this library was built without CUDA");
  const library::Gpu& gpu = gpu_of(device);
  TORCH_CHECK(gpu.has_code, why_no_code(gpu));
}

void* current_stream(at::Device device) {
  if (!device.is_cuda()) return nullptr;
  void* stream = nullptr;
  TORCH_INTERNAL_ASSERT(aoti_torch_get_current_cuda_stream != nullptr,
                        "a tensor is on a GPU, but this PyTorch has no CUDA");
  TORCH_INTERNAL_ASSERT(aoti_torch_get_current_cuda_stream(device.index(), &stream) == 0);
  return stream;
}

}  // namespace

void connect_library() {
  const library::Facts& facts = library_facts();
  TORCH_CHECK(std::strcmp(facts.interface, FLASH_ATTN_EXT_INTERFACE) == 0,
              "libflash_attn_ext_kernels.so is of flash_attn_ext ", facts.version, " (interface ", facts.interface,
              "), and the extension of flash_attn_ext ", FLASH_ATTN_EXT_VERSION, " (interface ",
              FLASH_ATTN_EXT_INTERFACE, ")");
  static const cpu::Services services = services_of_torch();
  the_kernels = flash_attn_ext_kernels(&services);
}

const library::Facts& library_facts() { return *flash_attn_ext_kernels_facts(); }

const library::Kernels& kernels() { return *the_kernels; }

bool has_gpu_kernels() { return the_kernels->gpu.gpu != nullptr; }

const library::Gpu& gpu_of(at::Device device) {
  const library::Gpu& gpu = the_kernels->gpu.gpu(device.index());
  check_status(gpu.status);
  return gpu;
}

std::string why_no_code(const library::Gpu& gpu) {
  const std::string capability = std::to_string(gpu.major) + "." + std::to_string(gpu.minor);
  if (gpu.major < 8)
    return std::string("kernels need compute capability 8.0 or later, and ") + gpu.name + " has " + capability;
  return std::string("this library was built for compute capability ") + library_facts().cuda_archs +
         ", and has no code for " + gpu.name + ", which has " + capability +
         "; build it with FLASH_ATTN_EXT_ARCHS=" + capability;
}

void launch(at::Device device, c10::function_ref<library::Status(void* stream)> function) {
  require_code(device);
  check_status(function(current_stream(device)));
}

}  // namespace flash_attn_ext::host
