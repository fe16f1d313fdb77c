#include "host/python_tensors.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>

#include "host/operators.h"

namespace flash_attn_ext::host {
namespace {

// torch.Tensor and torch.nn.Parameter.
bool are_plain_tensors(const PythonOperands& operands) {
  return THPVariable_CheckTypeExact(Py_TYPE(operands.q)) && THPVariable_CheckTypeExact(Py_TYPE(operands.k)) &&
         THPVariable_CheckTypeExact(Py_TYPE(operands.v));
}

bool is_dense_4d(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_nested() && tensor.dim() == 4;
}

// at::autocast::is_autocast_enabled for a CPU or CUDA tensor, without its header, which includes all of ATen.
bool is_autocast_enabled(const at::Tensor& tensor) {
  const c10::DispatchKey key = tensor.is_cuda() ? c10::DispatchKey::AutocastCUDA : c10::DispatchKey::AutocastCPU;
  return !c10::impl::tls_is_dispatch_key_excluded(key);
}

}  // namespace

bool hold_memory(const PythonOperands& operands) {
  return are_plain_tensors(operands) && !THPVariable_Unpack(operands.q).is_meta() && !is_watched();
}

bool are_canonical(const PythonOperands& operands) {
  if (!are_plain_tensors(operands)) return false;
  const at::Tensor& q = THPVariable_Unpack(operands.q);
  const at::Tensor& k = THPVariable_Unpack(operands.k);
  const at::Tensor& v = THPVariable_Unpack(operands.v);
  if (!is_dense_4d(q) || !is_dense_4d(k) || !is_dense_4d(v)) return false;
  if (!q.is_cpu() && !q.is_cuda()) return false;
  return q.scalar_type() == k.scalar_type() && q.scalar_type() == v.scalar_type() && q.size(0) == k.size(0) &&
         q.size(0) == v.size(0) && k.size(1) == v.size(1) && !is_autocast_enabled(q);
}

}  // namespace flash_attn_ext::host
