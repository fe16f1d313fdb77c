#include "host/checks/tensor_checks.h"

#include <c10/util/Exception.h>

namespace flash_attn_ext::host {

std::string dtype_name(at::ScalarType dtype) { return std::string(c10::getDtypeNames(dtype).first); }

void check_element_type(const char* name, const at::Tensor& tensor, const char* to_cast) {
  const at::ScalarType dtype = tensor.scalar_type();
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf, name,
              " has dtype ", dtype_name(dtype), ", expected float32, float64, bfloat16 or float16; cast ", to_cast);
}

void check_dtype_and_device(const char* name, const at::Tensor& tensor, const at::Tensor& q) {
  TORCH_CHECK(tensor.scalar_type() == q.scalar_type(), name, " has dtype ", dtype_name(tensor.scalar_type()),
              ", but q has ", dtype_name(q.scalar_type()), "; they must agree: cast with ", name, ".to(q.dtype)");
  check_device(name, tensor, q);
}

void check_device(const char* name, const at::Tensor& tensor, const at::Tensor& q) {
  TORCH_CHECK(tensor.device() == q.device(), name, " is on ", tensor.device(), ", but q is on ", q.device(),
              "; move it with ", name, ".to(q.device)");
}

bool is_lazy(const at::Tensor& tensor) { return tensor.is_neg() || tensor._is_zerotensor(); }

// Batched and other wrapped tensors have no storage. Subclasses with a __torch_dispatch__ may have one without the
// values.
bool holds_memory(const at::Tensor& tensor) {
  return tensor.has_storage() && !tensor.is_meta() && !is_lazy(tensor) &&
         !tensor.unsafeGetTensorImpl()->is_python_dispatch();
}

void check_holds_memory(const char* name, const at::Tensor& tensor) {
  if (holds_memory(tensor) || tensor.is_meta() || tensor.layout() != at::kStrided) return;
  TORCH_CHECK(!is_lazy(tensor), name, " is a view that PyTorch computes lazily, so its values are not in memory; pass ",
              name, ".clone()");
  TORCH_CHECK(false, name, " is of a subclass whose values are not in memory of its own, but q, k and v are plain ",
              "tensors; pass ", name, " as a plain tensor, too");
}

void check_dense(const char* name, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.layout() == at::kStrided && !tensor.is_nested(), name, " has layout ", tensor.layout(),
              tensor.is_nested() ? " and is nested" : "", ", expected a dense tensor; convert it with ", name,
              tensor.is_nested() ? ".to_padded_tensor(0.0) and a mask" : ".to_dense()");
}

void check_rank(const char* name, const at::Tensor& tensor, int64_t rank, const char* layout) {
  TORCH_CHECK(tensor.dim() == rank, name, " has ", tensor.dim(), " dimensions (shape ", tensor.sizes(), "), expected ",
              rank, ": ", layout);
}

void check_size(const char* name, const char* what, int64_t got, int64_t expected, const char* of) {
  TORCH_CHECK(got == expected, name, " has ", what, " ", got, ", expected ", expected, " (that of ", of, ")");
}

}  // namespace flash_attn_ext::host
