#include "host/call/python_call.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include "host/call/fields.h"
#include "host/call/operators.h"
#include "host/checks/tensor_checks.h"

namespace flash_attn_ext::host {
namespace {

namespace py = pybind11;

// Whether all are of type torch.Tensor or torch.nn.Parameter, and of no subclass.
bool are_plain_tensors(const PythonQkv& qkv) {
  return THPVariable_CheckTypeExact(Py_TYPE(qkv.q)) && THPVariable_CheckTypeExact(Py_TYPE(qkv.k)) &&
         THPVariable_CheckTypeExact(Py_TYPE(qkv.v));
}

bool is_dense_4d(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_nested() && tensor.dim() == 4;
}

// Whether a tensor's values are not in memory of its own. PyTorch's older vmap, which predates functorch, batches
// tensors in its own way. torch.autograd.functional and is_grads_batched=True still use it.
bool only_stands_for_values(const at::Tensor& tensor) {
  return is_lazy(tensor) || tensor.key_set().has(c10::DispatchKey::Batched);
}

// at::autocast::is_autocast_enabled for a CPU or CUDA tensor, without its header, which includes all of ATen.
bool is_autocast_enabled(const at::Tensor& tensor) {
  const c10::DispatchKey key = tensor.is_cuda() ? c10::DispatchKey::AutocastCUDA : c10::DispatchKey::AutocastCPU;
  return !c10::impl::tls_is_dispatch_key_excluded(key);
}

bool are_canonical(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  if (!is_dense_4d(q) || !is_dense_4d(k) || !is_dense_4d(v)) return false;
  if (!q.is_cpu() && !q.is_cuda()) return false;
  return q.scalar_type() == k.scalar_type() && q.scalar_type() == v.scalar_type() && q.size(0) == k.size(0) &&
         q.size(0) == v.size(0) && k.size(1) == v.size(1) && !is_autocast_enabled(q);
}

template <class Value>
struct Reader {
  static Value read(py::handle item) { return item.cast<Value>(); }
};

template <>
struct Reader<at::Tensor> {
  static at::Tensor read(py::handle item) {
    if (!THPVariable_Check(item.ptr())) throw py::cast_error("expected a torch.Tensor");
    return THPVariable_Unpack(item.ptr());
  }
};

template <class Value>
struct Reader<std::optional<Value>> {
  static std::optional<Value> read(py::handle item) {
    if (item.is_none()) return std::nullopt;
    return Reader<Value>::read(item);
  }
};

template <class Value>
void read_field(const char* name, py::handle item, Value& value) {
  try {
    value = Reader<Value>::read(item);
  } catch (const py::cast_error& error) {
    TORCH_CHECK_TYPE(false, name, " cannot be ", Py_TYPE(item.ptr())->tp_name, ": ", error.what());
  }
}

// `type`: the class of flash_attn_ext/_call/problem.py whose fields are those of Inputs.
template <class Inputs>
Inputs read_fields(PyObject* tuple, const char* type) {
  Inputs inputs;
  constexpr size_t kCount = std::tuple_size_v<std::decay_t<decltype(fields_of(inputs))>>;
  TORCH_CHECK_TYPE(PyTuple_Check(tuple) && PyTuple_GET_SIZE(tuple) == Py_ssize_t{kCount},
                   "the problem must be a tuple with the ", kCount, " fields of flash_attn_ext._call.problem.", type);
  Py_ssize_t index = 0;
  visit_fields(inputs,
               [&](const char* name, auto& value) { read_field(name, PyTuple_GET_ITEM(tuple, index++), value); });
  return inputs;
}

}  // namespace

QkvKind kind_of_qkv(const PythonQkv& qkv) {
  if (!are_plain_tensors(qkv) || is_watched()) return QkvKind::kSymbolic;
  const at::Tensor& q = THPVariable_Unpack(qkv.q);
  const at::Tensor& k = THPVariable_Unpack(qkv.k);
  const at::Tensor& v = THPVariable_Unpack(qkv.v);
  if (q.is_meta() || only_stands_for_values(q) || only_stands_for_values(k) || only_stands_for_values(v)) {
    return QkvKind::kSymbolic;
  }
  if (is_transformed()) return QkvKind::kTransformed;
  if (!are_canonical(q, k, v)) return QkvKind::kPlain;
  return q.size(1) == k.size(1) ? QkvKind::kEqualHeads : QkvKind::kCanonical;
}

AttentionInputs inputs_of(PyObject* problem) { return read_fields<AttentionInputs>(problem, "Problem"); }

KvCacheInputs cache_of(PyObject* cache) { return read_fields<KvCacheInputs>(cache, "KvCache"); }

}  // namespace flash_attn_ext::host
