#include "host/call/direct_calls.h"

#include <ATen/ops/amax.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "host/cache/kv_cache.h"
#include "host/call/autograd.h"
#include "host/call/cache_inputs.h"
#include "host/call/python_call.h"
#include "host/checks/checks.h"
#include "host/checks/tensor_checks.h"
#include "host/tables/table_sums.h"

namespace flash_attn_ext::host {
namespace {

namespace py = pybind11;

// The arguments of each function in order. Each struct has nothing but pointers, so its layout is that in which Python
// passes them.
struct SdpaArguments {
  PythonQkv qkv;
  PyObject *attn_mask, *dropout_p, *is_causal, *scale, *enable_gqa;
};

struct ScoreArguments {
  PyObject *causal, *window, *bias, *mask, *intervals, *alibi_slopes, *softcap, *sink;
};

struct AttentionArguments {
  PythonQkv qkv;
  ScoreArguments scores;
  PyObject *dropout_p, *scale, *layout, *return_lse, *return_max_logit, *backend, *allow_tf32;
  PyObject *bias_table, *bias_entries;
};

struct CacheArguments {
  PythonQkv qkv;
  PyObject *k_new, *v_new, *cache_seqlens, *block_table, *cache_batch_idx, *rotary_cos, *rotary_sin,
      *rotary_interleaved;
  ScoreArguments scores;
  PyObject *scale, *layout, *return_lse, *return_max_logit, *backend;
};

// What a call returns besides out.
struct WantedResults {
  bool lse = false;
  bool row_max = false;
  bool head_max = false;  // in place of row_max
};

// Each of the following functions reads one argument. It returns false for an unusual one, which leaves the call to
// Python.

bool is(PyObject* given, const char* text) {
  return PyUnicode_CheckExact(given) && PyUnicode_CompareWithASCIIString(given, text) == 0;
}

bool read(PyObject* given, bool& flag) {
  flag = given == Py_True;
  return flag || given == Py_False;
}

bool read(PyObject* given, std::optional<double>& number) {
  if (given == Py_None) return true;
  if (PyFloat_CheckExact(given)) {
    number = PyFloat_AS_DOUBLE(given);
    return true;
  }
  if (!PyLong_CheckExact(given)) return false;
  number = PyLong_AsDouble(given);
  if (*number != -1.0 || !PyErr_Occurred()) return true;
  PyErr_Clear();
  return false;
}

// Reads a number of keys, 0 or more.
bool read(PyObject* given, std::optional<int64_t>& count) {
  if (given == Py_None) return true;
  if (!PyLong_CheckExact(given)) return false;
  int overflow = 0;
  count = PyLong_AsLongLongAndOverflow(given, &overflow);
  return overflow == 0 && *count >= 0;
}

bool read_window(PyObject* given, AttentionInputs& in) {
  if (given == Py_None) return true;
  if (PyTuple_CheckExact(given)) {
    return PyTuple_GET_SIZE(given) == 2 && read(PyTuple_GET_ITEM(given, 0), in.window_left) &&
           read(PyTuple_GET_ITEM(given, 1), in.window_right);
  }
  return read(given, in.window_left) && read(given, in.window_right);
}

bool read_causal(PyObject* given, std::optional<std::string>& causal) {
  if (given == Py_None) return true;
  for (const char* alignment : {"top_left", "bottom_right"}) {
    if (!is(given, alignment)) continue;
    causal = alignment;
    return true;
  }
  return false;
}

bool read_backend(PyObject* given, std::optional<std::string>& backend) {
  if (given == Py_None) return true;
  if (!PyUnicode_CheckExact(given)) return false;
  if (const char* name = PyUnicode_AsUTF8(given)) {
    backend = name;
    return true;
  }
  PyErr_Clear();
  return false;
}

bool read_layout(PyObject* given, bool& sequence_first) {
  sequence_first = is(given, "bshd");
  return sequence_first || is(given, "bhsd");
}

bool read_wanted(PyObject* return_lse, PyObject* return_max_logit, WantedResults& wanted) {
  wanted.head_max = return_max_logit == Py_True || is(return_max_logit, "head");
  wanted.row_max = is(return_max_logit, "row");
  const bool is_known = wanted.head_max || wanted.row_max || return_max_logit == Py_False;
  return is_known && read(return_lse, wanted.lse);
}

// Whether a dropout probability is 0. With any other, a seed has to be drawn.
bool is_zero(PyObject* given) {
  std::optional<double> number;
  return read(given, number) && number == 0.0;
}

bool read(PyObject* given, std::optional<at::Tensor>& tensor) {
  if (given == Py_None) return true;
  if (!THPVariable_CheckExact(given)) return false;
  const at::Tensor& unpacked = THPVariable_Unpack(given);
  if (unpacked.layout() != at::kStrided || unpacked.is_nested()) return false;
  tensor = unpacked;
  return true;
}

bool read_table(PyObject* given, std::optional<at::Tensor>& table) {
  return read(given, table) && (!table || table->dim() == 4);
}

bool read_qkv(const PythonQkv& given, QkvKind least, AttentionInputs& in) {
  if (kind_of_qkv(given) < least) return false;
  in.q = THPVariable_Unpack(given.q);
  in.k = THPVariable_Unpack(given.k);
  in.v = THPVariable_Unpack(given.v);
  return true;
}

bool read_scores(const ScoreArguments& given, AttentionInputs& in) {
  return read_causal(given.causal, in.causal) && read_window(given.window, in) && read_table(given.bias, in.bias) &&
         read_table(given.mask, in.mask) && read_table(given.intervals, in.intervals) &&
         read(given.alibi_slopes, in.alibi_slopes) && (!in.alibi_slopes || in.alibi_slopes->dim() <= 2) &&
         read(given.softcap, in.softcap) && read(given.sink, in.sink);
}

// Reads a mask in PyTorch's sense, which is a bias unless it is boolean.
bool read_attn_mask(PyObject* given, AttentionInputs& in) {
  std::optional<at::Tensor> table;
  if (!read_table(given, table)) return false;
  if (!table) return true;
  if (in.causal || table->device() != in.q.device()) return false;
  if (!broadcasts_to_scores(*table, in, longest_sequences(in))) return false;
  const at::ScalarType dtype = table->scalar_type();
  if (dtype != at::kBool && dtype != at::kFloat && dtype != in.q.scalar_type()) return false;
  (dtype == at::kBool ? in.mask : in.bias) = std::move(table);
  return true;
}

// Makes a view of shape (B, H, S, D) of (B, S, H, D).
bool heads_first(at::Tensor& tensor) {
  if (tensor.dim() != 4) return false;
  tensor = tensor.transpose(1, 2);
  return true;
}

bool heads_first(std::optional<at::Tensor>& tensor) { return !tensor || heads_first(*tensor); }

bool tables_fit(const AttentionInputs& in) {
  const SequenceLengths longest = longest_sequences(in);
  return (!in.bias || broadcasts_to_scores(*in.bias, in, longest)) &&
         (!in.mask || broadcasts_to_scores(*in.mask, in, longest));
}

py::object to_python(at::Tensor tensor) {
  PyObject* object = THPVariable_Wrap(std::move(tensor));
  if (object == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(object);
}

// The largest of each head's rows, from the (B, H, S) of all rows.
at::Tensor head_max(const at::Tensor& row_max) {
  constexpr double kNothing = -std::numeric_limits<double>::infinity();
  if (row_max.numel() == 0) return at::full({row_max.size(1)}, kNothing, row_max.options());
  return at::amax(row_max, {0, 2});
}

// `run` returns ForwardOutputs; it runs without the GIL. The caller destroys the inputs with the GIL, because a tensor
// that Python also holds would otherwise acquire it by itself.
template <class Run>
py::object results_of(const AttentionInputs& in, const WantedResults& wanted, const Run& run) {
  ForwardOutputs outputs;
  {
    const py::gil_scoped_release release;
    outputs = run();
    if (in.sequence_first) outputs.out = outputs.out.transpose(1, 2);
    if (wanted.head_max) outputs.row_max = head_max(outputs.row_max);
  }
  py::object out = to_python(std::move(outputs.out));
  if (!in.wants_row_max) return wanted.lse ? py::make_tuple(out, to_python(std::move(outputs.lse))) : std::move(out);
  py::object largest = to_python(std::move(outputs.row_max));
  if (!wanted.lse) return py::make_tuple(out, largest);
  return py::make_tuple(out, to_python(std::move(outputs.lse)), largest);
}

// Whether the shapes of q, k and v go together. If they do not, Python raises the error, with PyTorch's names.
bool shapes_fit(const AttentionInputs& in) {
  return in.k.size(3) == in.q.size(3) && in.v.size(2) == in.k.size(2) && in.k.device() == in.q.device() &&
         in.v.device() == in.q.device();
}

py::object direct_sdpa(const SdpaArguments& given) {
  AttentionInputs in;
  bool is_causal = false, enable_gqa = false;
  if (!read_qkv(given.qkv, QkvKind::kCanonical, in) || !shapes_fit(in) || !read(given.is_causal, is_causal) ||
      !read(given.enable_gqa, enable_gqa) || !read(given.scale, in.scale) || !is_zero(given.dropout_p)) {
    return py::none();
  }
  const int64_t num_heads_q = in.num_heads_q(), num_heads_k = in.num_heads_k();
  const bool is_shared = enable_gqa && num_heads_k > 0 && num_heads_q % num_heads_k == 0;
  if (num_heads_q != num_heads_k && !is_shared) return py::none();
  if (is_causal) in.causal = "top_left";
  if (!read_attn_mask(given.attn_mask, in)) return py::none();
  return results_of(in, {}, [&] { return attention(in, /*wants_lse=*/false); });
}

// Looks the bias up in a table, by the entries of all diagonals or of all pairs.
bool look_bias_up(const AttentionArguments& given, AttentionInputs& in) {
  std::optional<at::Tensor> table, entries;
  if (!read(given.bias_table, table) || !read(given.bias_entries, entries)) return false;
  if (!table || !entries) return !table && !entries;
  const int64_t heads = in.num_heads_q(), queries = in.q.size(2), keys = in.k.size(2);
  const at::ScalarType dtype = table->scalar_type();
  const bool takes_table = !in.bias && table->dim() == 2 && table->size(0) == heads && table->size(1) > 0 &&
                           table->device() == in.q.device() && (dtype == in.q.scalar_type() || dtype == at::kFloat);
  const bool is_relative = entries->dim() == 1;
  const bool takes_entries =
      entries->scalar_type() == at::kInt && entries->device() == in.q.device() && entries->is_contiguous() &&
      queries > 0 && keys > 0 &&
      (is_relative ? entries->size(0) == queries + keys - 1
                   : entries->dim() == 2 && entries->size(0) == queries && entries->size(1) == keys);
  if (!takes_table || !takes_entries || !holds_memory(*table)) return false;
  const at::Tensor bias = recorded_look_up(*table, entries->view({-1}));
  in.bias = is_relative ? bias.view({1, heads, 1, -1}) : bias.view({1, heads, queries, keys});
  in.bias_is_relative = is_relative;
  return true;
}

py::object direct_attention(const AttentionArguments& given) {
  AttentionInputs in;
  WantedResults wanted;
  if (!read_qkv(given.qkv, QkvKind::kCanonical, in) || !read_scores(given.scores, in) || !is_zero(given.dropout_p) ||
      !read(given.scale, in.scale) || !read_layout(given.layout, in.sequence_first) ||
      !read_wanted(given.return_lse, given.return_max_logit, wanted) || !read_backend(given.backend, in.backend) ||
      !read(given.allow_tf32, in.allow_tf32)) {
    return py::none();
  }
  if (in.sequence_first && !(heads_first(in.q) && heads_first(in.k) && heads_first(in.v))) return py::none();
  if (!tables_fit(in) || !look_bias_up(given, in)) return py::none();
  in.wants_row_max = wanted.row_max || wanted.head_max;
  return results_of(in, wanted, [&] { return attention(in, wanted.lse); });
}

bool read_cache(const CacheArguments& given, KvCacheInputs& cache) {
  return read(given.k_new, cache.k_new) && read(given.v_new, cache.v_new) &&
         read(given.block_table, cache.block_table) && read(given.cache_batch_idx, cache.cache_batch_idx) &&
         read(given.rotary_cos, cache.rotary_cos) && read(given.rotary_sin, cache.rotary_sin) &&
         read(given.rotary_interleaved, cache.rotary_interleaved);
}

// Reads a tensor, or one length for all sequences. If the length is impossible, Python raises the error.
bool read_lengths(PyObject* given, const AttentionInputs& in, KvCacheInputs& cache) {
  if (!PyLong_CheckExact(given)) {
    std::optional<at::Tensor> lengths;
    if (!read(given, lengths) || !lengths) return false;
    cache.cache_seqlens = *std::move(lengths);
    return true;
  }
  if (in.q.dim() != 4 || in.k.dim() != 4 || (cache.k_new && cache.k_new->dim() != 4) ||
      (cache.block_table && cache.block_table->dim() != 2)) {
    return false;
  }
  std::optional<int64_t> length;
  if (!read(given, length) || *length > cache.capacity(in) - cache.num_new()) return false;
  cache.cache_seqlens = at::full({in.batch()}, *length, in.q.options().dtype(at::kInt));
  return true;
}

py::object direct_attention_with_kvcache(const CacheArguments& given) {
  AttentionInputs in;
  KvCacheInputs cache;
  WantedResults wanted;
  if (!read_qkv(given.qkv, QkvKind::kPlain, in) || !read_cache(given, cache) || !read_scores(given.scores, in) ||
      !read(given.scale, in.scale) || !read_layout(given.layout, in.sequence_first) ||
      !read_wanted(given.return_lse, given.return_max_logit, wanted) || !read_backend(given.backend, in.backend)) {
    return py::none();
  }
  if (in.sequence_first && !(heads_first(in.q) && heads_first(in.k) && heads_first(in.v) && heads_first(cache.k_new) &&
                             heads_first(cache.v_new))) {
    return py::none();
  }
  if (!read_lengths(given.cache_seqlens, in, cache)) return py::none();
  in.wants_row_max = wanted.row_max || wanted.head_max;
  return results_of(in, wanted, [&] { return attention_with_kvcache(in, cache, wanted.lse); });
}

template <class Arguments, py::object (*kFunction)(const Arguments&)>
PyObject* call(PyObject*, PyObject* const* given, Py_ssize_t num_given) {
  static_assert(std::is_trivially_copyable_v<Arguments>);
  constexpr Py_ssize_t kExpected = sizeof(Arguments) / sizeof(PyObject*);
  try {
    TORCH_CHECK_TYPE(num_given == kExpected, "expected ", kExpected, " arguments, got ", num_given);
    Arguments arguments;
    std::memcpy(&arguments, given, sizeof(Arguments));
    return kFunction(arguments).release().ptr();
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

template <class Arguments, py::object (*kFunction)(const Arguments&)>
PyMethodDef method(const char* name, const char* doc) {
  // Python casts the pointer back to the type that METH_FASTCALL implies.
  const auto function = reinterpret_cast<void (*)()>(&call<Arguments, kFunction>);
  return {name, reinterpret_cast<PyCFunction>(function), METH_FASTCALL, doc};
}

}  // namespace

void add_direct_calls(PyObject* module) {
  static PyMethodDef methods[] = {
      method<SdpaArguments, direct_sdpa>("direct_sdpa", "scaled_dot_product_attention, or None: see _C.pyi."),
      method<AttentionArguments, direct_attention>("direct_attention", "attention, or None: see _C.pyi."),
      method<CacheArguments, direct_attention_with_kvcache>("direct_attention_with_kvcache",
                                                            "attention_with_kvcache, or None: see _C.pyi."),
      {nullptr, nullptr, 0, nullptr}};
  if (PyModule_AddFunctions(module, methods) != 0) throw py::error_already_set();
}

}  // namespace flash_attn_ext::host
