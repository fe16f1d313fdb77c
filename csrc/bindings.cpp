// flash_attn_ext._C: passes Python's arguments to host/. flash_attn_ext/_C.pyi has its types.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "host/aten/front.h"
#include "host/attention.h"
#include "host/backends.h"
#include "host/cache/kv_cache.h"
#include "host/call/autograd.h"
#include "host/call/direct_calls.h"
#include "host/call/fields.h"
#include "host/call/python_call.h"
#include "host/derivatives/plain_tiles.h"
#include "host/derivatives/tangents.h"
#include "host/library/library.h"
#include "host/make_params.h"
#include "host/report/build_info.h"
#include "host/report/explain.h"
#include "host/report/inspect.h"
#include "host/report/log.h"
#include "host/tables/block_mask.h"
#include "host/tables/table_sums.h"

namespace py = pybind11;

namespace flash_attn_ext::host {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

// Binds a function whose last argument is one attention call, a Problem.
template <class... Leading, class Function>
void define_attention_function(py::module_& module, const char* name, const char* doc, Function function) {
  module.def(
      name,
      [function](Leading... leading, py::handle problem) {
        const AttentionInputs inputs = inputs_of(problem.ptr());
        // The GIL is held again when the inputs are destroyed. Otherwise each tensor that Python also holds would
        // acquire it by itself.
        const py::gil_scoped_release release;
        return function(leading..., inputs);
      },
      doc);
}

void define_sums(py::module_& module) {
  module.def("delta", &compute_delta, py::arg("out"), py::arg("dout"), py::arg("dlse") = py::none(),
             "rowsum(dout * out) - dlse, the first stage of the backward pass.",
             py::call_guard<py::gil_scoped_release>());

  module.def("look_up", &look_up, py::arg("table"), py::arg("entries"), "(rows, columns): the entry of each column.",
             py::call_guard<py::gil_scoped_release>());

  module.def(
      "table_sums",
      [](const at::Tensor& values, const at::Tensor& entries, int64_t num_entries) {
        return table_sums(values, entries, num_entries, accumulate_type(values));
      },
      py::arg("values"), py::arg("entries"), py::arg("num_entries"),
      "(rows, num_entries): sums of the columns of each entry, in a fixed order.",
      py::call_guard<py::gil_scoped_release>());

  module.def("block_mask", &block_mask_of_lists, py::arg("counts"), py::arg("indices"), py::arg("width"),
             "(..., query blocks, width) bool: which blocks of keys lists on a GPU have.",
             py::call_guard<py::gil_scoped_release>());
}

// Functions by which users and tests inspect what a call computes.
void define_inspection(py::module_& module) {
  module.def(
      "dropout_mask",
      [](const at::Tensor& rng_seed, double dropout_p, int64_t batch, int64_t num_heads, int64_t seqlen_q,
         int64_t seqlen_k) {
        return dropout_mask(rng_seed, dropout_p,
                            {.batch = batch, .num_heads = num_heads, .seqlen_q = seqlen_q, .seqlen_k = seqlen_k});
      },
      py::arg("rng_seed"), py::arg("dropout_p"), py::arg("batch"), py::arg("num_heads"), py::arg("seqlen_q"),
      py::arg("seqlen_k"), "(B, H, Sq, Sk) bool on the CPU, True = kept: the bits that every backend draws.");

  module.def("visible_keys", &visible_keys, py::arg("seqlen_q"), py::arg("seqlen_k"), py::arg("causal") = py::none(),
             py::arg("window_left") = py::none(), py::arg("window_right") = py::none(),
             "(Sq, 2) int64: the keys [begin, end) that each query sees.");

  module.def("visible_queries", &visible_queries, py::arg("seqlen_q"), py::arg("seqlen_k"),
             py::arg("causal") = py::none(), py::arg("window_left") = py::none(), py::arg("window_right") = py::none(),
             "(Sk, 2) int64: the queries [begin, end) that see each key.");
}

// The GPU kernels of flash_attn_ext/derivatives/: forward mode, and the elementwise steps on plain tiles of scores.
void define_derivatives(py::module_& module) {
  define_attention_function<at::Tensor, at::Tensor, OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor>(
      module, "attention_tangents",
      "(out_tangent, lse_tangent), or None where no kernel takes the call; see flash_attn_ext/_C.pyi.",
      [](const at::Tensor& out, const at::Tensor& lse, const OptionalTensor& q_tangent, const OptionalTensor& k_tangent,
         const OptionalTensor& v_tangent, const OptionalTensor& sink_tangent, const AttentionInputs& inputs) {
        return attention_tangents(inputs, {.out = out,
                                           .lse = lse,
                                           .q_tangent = q_tangent,
                                           .k_tangent = k_tangent,
                                           .v_tangent = v_tangent,
                                           .sink_tangent = sink_tangent});
      });

  module.def(
      "plain_weights",
      [](const at::Tensor& products, const OptionalTensor& product_tangents, const at::Tensor& lse, double scale,
         std::pair<int64_t, int64_t> visible, int64_t num_queries, at::ScalarType dtype, const at::Tensor& lse_tangent,
         bool wants_weights) {
        return plain_weights({products, product_tangents, lse, scale, visible, num_queries, dtype}, lse_tangent,
                             wants_weights);
      },
      "[P, P dS] of a plain tile, whose row sums are added to lse_tangent; see flash_attn_ext/_C.pyi.",
      py::call_guard<py::gil_scoped_release>());

  module.def(
      "plain_gradients",
      [](const at::Tensor& products, const OptionalTensor& product_tangents, const at::Tensor& lse, double scale,
         std::pair<int64_t, int64_t> visible, int64_t num_queries, at::ScalarType dtype, const at::Tensor& lse_tangent,
         const at::Tensor& weight_gradients, const OptionalTensor& weight_gradient_tangents, const at::Tensor& delta,
         const at::Tensor& delta_tangent, bool wants_weight_tangents) {
        return plain_gradients({products, product_tangents, lse, scale, visible, num_queries, dtype},
                               {lse_tangent, weight_gradients, weight_gradient_tangents, delta, delta_tangent},
                               wants_weight_tangents);
      },
      "[P', dS, dS'] of a plain tile; see flash_attn_ext/_C.pyi.", py::call_guard<py::gil_scoped_release>());
}

// Classifies a call's tensors, which decides the path that the call takes in Python.
void define_operands(py::module_& module) {
  module.attr("SYMBOLIC") = static_cast<int>(QkvKind::kSymbolic);
  module.attr("TRANSFORMED") = static_cast<int>(QkvKind::kTransformed);
  module.attr("PLAIN") = static_cast<int>(QkvKind::kPlain);
  module.attr("CANONICAL") = static_cast<int>(QkvKind::kCanonical);
  module.attr("EQUAL_HEADS") = static_cast<int>(QkvKind::kEqualHeads);
  module.def(
      "operands_of",
      [](py::handle q, py::handle k, py::handle v) {
        return static_cast<int>(kind_of_qkv({q.ptr(), k.ptr(), v.ptr()}));
      },
      "What q, k and v are: SYMBOLIC, TRANSFORMED, PLAIN, CANONICAL or EQUAL_HEADS.");
  const auto names = [](const auto&... field) { return py::make_tuple(field.name...); };
  module.attr("PROBLEM_FIELDS") = std::apply(names, kFields);
  module.attr("CACHE_FIELDS") = std::apply(names, kCacheFields);
}

// Kernels that run in front of the Python kernels of integrations/torch_backend.
void define_fronts(py::module_& module) {
  py::class_<OperatorFront>(module, "OperatorFront")
      .def(py::init<const std::string&, const std::string&>(), py::arg("operator_name"), py::arg("dispatch_key"))
      .def("remove", &OperatorFront::remove, py::call_guard<py::gil_scoped_release>());
  module.def("operators_with_front", &operators_with_front, "Names of the operators that OperatorFront takes.");
  module.def("passes_of_fronts", &passes_of_fronts, "[forward, backward]: how many all fronts have run.");
  module.def("recorded_backward_passes", &num_recorded_backward_passes,
             "How many backward passes the nodes have run that forward passes left in autograd's graph.");
}

py::dict build_info() {
  py::dict info;
  for (const auto& [name, value] : build_facts()) info[py::str(name)] = value;
  py::list names;
  for (const Backend& backend : backends()) names.append(backend.name);
  info["backends"] = names;
  return info;
}

void define_build_facts(py::module_& module) {
  module.def(
      "gpu_code",
      [](std::pair<int, int> capability, const std::string& archs) {
        return kernels().code_for(capability.first, capability.second, archs.c_str());
      },
      "\"machine code\", \"PTX\" or None: what a library that was compiled for archs has for a GPU.");
  module.def("build_info", &build_info, "How this library was built, and its backends in the order they are tried.");
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "Exact attention: the compiled half of flash_attn_ext. Call it through flash_attn_ext.functional.";
  connect_library();

  define_attention_function<>(
      module, "attention", "(out, lse, row_max) of one attention call in canonical form, differentiable.",
      [](const AttentionInputs& inputs) {
        ForwardOutputs outputs = attention(inputs, /*wants_lse=*/true);
        return std::make_tuple(std::move(outputs.out), std::move(outputs.lse), std::move(outputs.row_max));
      });

  define_attention_function<>(
      module, "attention_forward",
      "(out, lse, lse_residual, row_max) of one attention call in canonical form; see flash_attn_ext/_C.pyi.",
      [](const AttentionInputs& inputs) {
        ForwardOutputs outputs = attention_forward(inputs, /*wants_lse=*/true);
        return std::make_tuple(std::move(outputs.out), std::move(outputs.lse), std::move(outputs.lse_residual),
                               std::move(outputs.row_max));
      });

  module.def(
      "attention_with_kvcache",
      [](py::handle problem, py::handle cache) {
        const AttentionInputs inputs = inputs_of(problem.ptr());
        const KvCacheInputs cache_inputs = cache_of(cache.ptr());
        const py::gil_scoped_release release;
        ForwardOutputs outputs = attention_with_kvcache(inputs, cache_inputs, /*wants_lse=*/true);
        return std::make_tuple(std::move(outputs.out), std::move(outputs.lse), std::move(outputs.row_max));
      },
      "(out, lse, row_max) of one call with a cache, into which k_new and v_new go first; see flash_attn_ext/_C.pyi.");

  using OutputMask = decltype(BackwardInputs::output_mask);
  define_attention_function<at::Tensor, OptionalTensor, at::Tensor, at::Tensor, OptionalTensor, OutputMask>(
      module, "attention_backward",
      "[dq, dk, dv, dbias, dalibi_slopes, dsink]; None where output_mask does not ask for one.",
      [](const at::Tensor& dout, const OptionalTensor& dlse, const at::Tensor& out, const at::Tensor& lse,
         const OptionalTensor& lse_residual, OutputMask output_mask, const AttentionInputs& inputs) {
        return attention_backward(inputs, {.dout = dout,
                                           .dlse = dlse,
                                           .out = out,
                                           .lse = lse,
                                           .lse_residual = lse_residual,
                                           .output_mask = output_mask});
      });

  define_attention_function<>(module, "attention_explain",
                              "[(backend, reasons it cannot run)] in the order in which backends are tried.",
                              [](const AttentionInputs& inputs) { return explain(inputs); });

  define_attention_function<std::array<bool, 6>>(
      module, "attention_plan",
      "(forward, backward), as JSON: what the backend that the call names would run. Needs no device of its kind.",
      [](std::array<bool, 6> output_mask, const AttentionInputs& inputs) { return report_plans(inputs, output_mask); });

  define_sums(module);
  define_inspection(module);

  define_derivatives(module);
  define_operands(module);

  add_direct_calls(module.ptr());

  define_fronts(module);

  module.def(
      "set_copy_log",
      [](py::function log) {
        // The callback is never released, because it may be called until the process ends.
        set_copy_log([log = log.release()](const char* name, const at::Tensor& tensor, const char* needed) {
          const py::gil_scoped_acquire gil;
          log(name, tensor, needed);
        });
      },
      "log(name, tensor, needed) is called for each tensor that is copied because no kernel can read it in place.");

  define_build_facts(module);
}

}  // namespace flash_attn_ext::host
