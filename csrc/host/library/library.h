// The kernels' library, as this extension calls it: with PyTorch's stream, and with its errors as exceptions.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/FunctionRef.h>

#include <new>
#include <string>
#include <type_traits>

#include "library/kernels.h"

namespace flash_attn_ext::host {

// Checks that the library was built from the sources of this extension, and lends it PyTorch's threads and GEMM of
// bfloat16. Called once, before all others. Throws an error with both versions if they differ.
void connect_library();

const library::Facts& library_facts();

const library::Kernels& kernels();

// Whether the library has kernels for GPUs.
bool has_gpu_kernels();

// What the library knows of a GPU. Throws what the CUDA runtime says if it cannot be asked.
const library::Gpu& gpu_of(at::Device device);

// Why the library cannot run anything on a GPU that it has no code for.
std::string why_no_code(const library::Gpu& gpu);

// Runs a function of the library that launches kernels. `device` is the current one, and `function` gets its current
// stream, or nullptr on the CPU. Throws an error before it calls the function if the library has no kernels for GPUs,
// or no code for this one. Throws torch.AcceleratorError if the function returns an error of the CUDA runtime, and
// std::bad_alloc for kNoMemory.
void launch(at::Device device, c10::function_ref<library::Status(void* stream)> function);

// A plan of the library, which is freed with this object. Throws std::bad_alloc if there was no memory for it.
template <class Planned>
class OwnedPlan {
 public:
  explicit OwnedPlan(const Planned& planned) : planned_(planned) {
    if (planned.plan == nullptr) throw std::bad_alloc();
  }
  OwnedPlan(const OwnedPlan&) = delete;
  OwnedPlan& operator=(const OwnedPlan&) = delete;
  ~OwnedPlan() { free_plan(planned_.plan); }

  const auto& operator*() const { return *planned_.plan; }
  const Planned* operator->() const { return &planned_; }

 private:
  static void free_plan(const plan::ForwardPlan* plan) { kernels().free_forward(plan); }
  static void free_plan(const plan::BackwardPlan* plan) { kernels().free_backward(plan); }

  Planned planned_;
};
using ForwardPlan = OwnedPlan<library::PlannedForward>;
using BackwardPlan = OwnedPlan<library::PlannedBackward>;

// The text that a function of the library writes of a plan. Throws std::bad_alloc without memory for it.
template <class Plan>
std::string text_of(library::Status (*write)(Plan plan, const library::TextSink& text),
                    std::type_identity_t<Plan> plan) {
  std::string text;
  const auto append = [](void* context, const char* part) { static_cast<std::string*>(context)->append(part); };
  if (write(plan, {.context = &text, .append = append}) == library::kNoMemory) throw std::bad_alloc();
  return text;
}

}  // namespace flash_attn_ext::host
