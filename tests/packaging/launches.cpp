// What stands before each launch, with a library in place of the real one, and GPUs that there are not. Ends with how
// much of it is wrong.
#include <c10/util/Exception.h>

#include <cstdio>
#include <cstring>
#include <exception>
#include <new>

#include "host/library/cpu_services.h"
#include "host/library/library.h"

namespace {

using flash_attn_ext::host::launch;
using flash_attn_ext::library::Facts;
using flash_attn_ext::library::Gpu;
using flash_attn_ext::library::Kernels;

constexpr Facts kFacts = {.interface = FLASH_ATTN_EXT_INTERFACE, .cuda_archs = "8.0;9.0a"};
constexpr Gpu kGpus[] = {
    {.name = "Newer", .major = 12, .minor = 1},
    {.name = "Older", .major = 7, .minor = 5},
    {.name = "Known", .major = 9, .has_code = true},
    {.status = 35},
};

Kernels table = {};
int num_wrong = 0;

// `what`: a part of the error, or nullptr if the function has to be called.
void expect(at::Device device, const char* what, flash_attn_ext::library::Status status = 0) {
  bool is_called = false;
  std::string error;
  try {
    launch(device, [&](void*) {
      is_called = true;
      return status;
    });
  } catch (const std::exception& caught) {
    error = caught.what();
  }
  const bool is_right = what == nullptr ? is_called && error.empty() : error.find(what) != std::string::npos;
  if (is_right && is_called == (what == nullptr || status != 0)) return;
  std::fprintf(stderr, "on %s: called %d, error: %s\n", device.str().c_str(), is_called, error.c_str());
  ++num_wrong;
}

}  // namespace

flash_attn_ext::cpu::Services flash_attn_ext::host::services_of_torch() { return {}; }

const Facts* flash_attn_ext_kernels_facts() { return &kFacts; }

const Kernels* flash_attn_ext_kernels(const flash_attn_ext::cpu::Services*) { return &table; }

int main() {
  flash_attn_ext::host::connect_library();
  expect({at::kCUDA, 0}, "tensors are on cuda:0, and this library was built without CUDA");
  table.gpu.gpu = [](int device) -> const Gpu& { return kGpus[device]; };
  table.gpu.take_error = [](int) { return "the driver is too old"; };
  expect({at::kCUDA, 0}, "built for compute capability 8.0;9.0a, and has no code for Newer, which has 12.1; build it");
  expect({at::kCUDA, 1}, "kernels need compute capability 8.0 or later, and Older has 7.5");
  expect({at::kCUDA, 2}, "this PyTorch has no CUDA");  // the program is linked without it: no stream
  expect({at::kCUDA, 3}, "CUDA error: the driver is too old");
  expect(at::kCPU, nullptr);
  expect(at::kCPU, "bad_alloc", flash_attn_ext::library::kNoMemory);
  return num_wrong;
}
