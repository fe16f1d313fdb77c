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
  check_launch(gpu.status);
  return gpu;
}

void* current_stream(at::Device device) {
  if (!device.is_cuda()) return nullptr;
  void* stream = nullptr;
  TORCH_INTERNAL_ASSERT(aoti_torch_get_current_cuda_stream != nullptr,
                        "a tensor is on a GPU, but this PyTorch has no CUDA");
  TORCH_INTERNAL_ASSERT(aoti_torch_get_current_cuda_stream(device.index(), &stream) == 0);
  return stream;
}

void check_launch(library::Status status) {
  if (status == 0) return;
  if (status == library::kNoMemory) throw std::bad_alloc();
  const std::string error = the_kernels->gpu.take_error(status);
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, status,
                              "CUDA error: " + error +
                                  "\nIt may come from an earlier call, because kernels run asynchronously; with "
                                  "CUDA_LAUNCH_BLOCKING=1 they do not.");
}

}  // namespace flash_attn_ext::host
