#include "host/aten/front.h"

#include <atomic>
#include <string_view>
#include <utility>

#include "host/aten/kernels.h"

namespace flash_attn_ext::host {
namespace {

std::array<std::atomic<int64_t>, 2> num_passes;

class Front final : public c10::OperatorKernel {
 public:
  Front(const FrontKernel& kernel, c10::SafeKernelFunction behind) : kernel_(kernel), behind_(std::move(behind)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const size_t num_arguments = op.schema().arguments().size();
    if (std::optional<Results> results = run(torch::jit::last(*stack, num_arguments))) {
      ++num_passes[kernel_.is_backward];
      torch::jit::drop(*stack, num_arguments);
      for (c10::IValue& result : *results) stack->push_back(std::move(result));
    } else {
      hand_on(op, keys, stack);
    }
  }

 private:
  // A call that fails here is passed on. It fails again in the kernel behind, which reports the error or takes another
  // kernel. Errors of the device and of its memory are reported at once.
  std::optional<Results> run(c10::ArrayRef<c10::IValue> arguments) const {
    try {
      return kernel_.run(arguments);
    } catch (const c10::OutOfMemoryError&) {
      throw;
    } catch (const c10::AcceleratorError&) {
      throw;
    } catch (const c10::Error&) {
      return std::nullopt;
    }
  }

  // Another thread may have restored PyTorch's kernels since this call began; these then run it.
  void hand_on(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) const {
    try {
      behind_.callBoxed(op, keys, stack);
    } catch (const c10::Error& error) {
      if (std::string_view(error.what_without_backtrace()).find("SafeKernelFunction has been invalidated") ==
          std::string_view::npos) {
        throw;
      }
      op.redispatchBoxed(keys, stack);
    }
  }

  const FrontKernel& kernel_;
  const c10::SafeKernelFunction behind_;
};

const FrontKernel& kernel_of(const std::string& operator_name) {
  for (const FrontKernel& kernel : front_kernels()) {
    if (operator_name == kernel.operator_name) return kernel;
  }
  TORCH_CHECK_VALUE(false, "no kernel goes in front of operator ", operator_name, "; operators_with_front() has those");
}

}  // namespace

OperatorFront::OperatorFront(const std::string& operator_name, const std::string& dispatch_key) {
  const FrontKernel& kernel = kernel_of(operator_name);
  const c10::DispatchKey key = c10::parseDispatchKey(dispatch_key);
  auto& dispatcher = c10::Dispatcher::singleton();
  const c10::OperatorHandle op = dispatcher.findSchemaOrThrow(("aten::" + operator_name).c_str(), "");
  auto functor = std::make_unique<Front>(kernel, op.getComputedKernelForDispatchKey(key));
  registration_ = std::make_unique<c10::RegistrationHandleRAII>(
      dispatcher.registerImpl(op.operator_name(), key, c10::KernelFunction::makeFromBoxedFunctor(std::move(functor)),
                              std::nullopt, nullptr, "flash_attn_ext torch_backend, csrc/host/aten/front.cpp"));
}

std::vector<std::string> operators_with_front() {
  std::vector<std::string> names;
  for (const FrontKernel& kernel : front_kernels()) names.emplace_back(kernel.operator_name);
  return names;
}

std::array<int64_t, 2> passes_of_fronts() { return {num_passes[0].load(), num_passes[1].load()}; }

}  // namespace flash_attn_ext::host
