#include "host/backends.h"

#include <sstream>

#include "host/checks.h"
#include "host/make_params.h"
#include "kernels/cpu/cpu_kernels.h"

namespace flash_attn_ext::host {
namespace {

std::vector<std::string> cpu_unsupported_reasons(const attention::AttentionParams&, at::Device device) {
  if (device.is_cpu()) return {};
  return {"it reads CPU memory, and the tensors are on " + device.str() + "; move them with .cpu()"};
}

void cpu_backward(const attention::BackwardParams& params) {
  if (params.dk.data || params.dv.data || params.dalibi_slopes) cpu::backward_dkdv(params);
  if (params.dq.data) cpu::backward_dq(params);
  if (params.dbias.present()) cpu::backward_dbias(params);
  if (params.dsink) cpu::backward_dsink(params);
}

std::vector<std::string> reasons_against(const Backend& backend, const AttentionInputs& inputs,
                                         const attention::AttentionParams& params) {
  std::vector<std::string> reasons = backend.unsupported_reasons(params, inputs.q.device());
  if (inputs.backend && *inputs.backend != backend.name) {
    reasons.push_back("the call asked for backend='" + *inputs.backend + "'");
  }
  return reasons;
}

void check_backend_name(const AttentionInputs& inputs) {
  if (!inputs.backend) return;
  std::ostringstream names;
  for (const Backend& backend : backends()) {
    if (*inputs.backend == backend.name) return;
    names << (names.tellp() > 0 ? ", " : "") << "'" << backend.name << "'";
  }
  TORCH_CHECK_VALUE(false, "backend is '", *inputs.backend, "', expected one of ", names.str(),
                    " or None for the first that can run");
}

}  // namespace

const std::vector<Backend>& backends() {
  static const std::vector<Backend> table = {
      {.name = "cpu",
       .unsupported_reasons = cpu_unsupported_reasons,
       .forward = cpu::forward,
       .backward = cpu_backward},
  };
  return table;
}

std::vector<Verdict> explain(const AttentionInputs& inputs) {
  check_inputs(inputs);
  check_backend_name(inputs);
  const attention::AttentionParams params = make_attention_params(inputs);
  std::vector<Verdict> verdicts;
  for (const Backend& backend : backends()) {
    verdicts.emplace_back(backend.name, reasons_against(backend, inputs, params));
  }
  return verdicts;
}

const Backend& choose_backend(const AttentionInputs& inputs, const attention::AttentionParams& params) {
  check_backend_name(inputs);
  for (const Backend& backend : backends()) {
    if (reasons_against(backend, inputs, params).empty()) return backend;
  }
  std::ostringstream message;
  message << "no backend can run this call:";
  for (const Backend& backend : backends()) {
    message << "\n  " << backend.name << ":";
    for (const std::string& reason : reasons_against(backend, inputs, params)) message << " " << reason << ".";
  }
  TORCH_CHECK(false, message.str());
}

}  // namespace flash_attn_ext::host
