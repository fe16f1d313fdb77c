// A program without PyTorch that runs the library's CPU kernels: causal attention with grouped heads and a softcap,
// forward and backward, beside the definition in double precision. Its threads are the simplest there are, and it
// has no GEMM of bfloat16.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/rows/narrow_float.h"
#include "library/kernels.h"

namespace {

using namespace flash_attn_ext;
using attention::ElementType;

constexpr int64_t kBatch = 2, kHeadsQ = 4, kHeadsK = 2, kQueries = 70, kKeys = 150, kDim = 40, kDimV = 24;
constexpr double kScale = 0.2, kSoftcap = 3.0;

constexpr cpu::Services kServices = {
    .num_threads = [] { return int64_t{1}; },
    .parallel_for = [](int64_t count, int64_t, void (*task)(void*, int64_t, int64_t),
                       void* context) { task(context, 0, count); },
    .has_tile_gemm_bf16 = [] { return false; },
    .tile_gemm_bf16 = nullptr,
    .release_tiles = [] {},
};

// A contiguous (batch, heads, rows, columns) tensor, and its values as doubles.
template <class Element>
struct Tensor {
  int64_t heads, rows, columns;
  std::vector<Element> elements = std::vector<Element>(kBatch * heads * rows * columns);

  void fill(std::mt19937& random) {
    std::normal_distribution<float> normal;
    for (Element& element : elements) element = Element(normal(random));
  }
  attention::MatrixView view() { return {elements.data(), heads * rows * columns, rows * columns, columns, 1}; }
  double at(int64_t batch, int64_t head, int64_t row, int64_t column) const {
    return static_cast<double>(elements[((batch * heads + head) * rows + row) * columns + column]);
  }
};

struct Sums {
  explicit Sums(int64_t heads, int64_t rows, int64_t columns)
      : heads(heads), rows(rows), columns(columns), values(kBatch * heads * rows * columns) {}
  int64_t heads, rows, columns;
  std::vector<double> values;
  double& at(int64_t batch, int64_t head, int64_t row, int64_t column) {
    return values[((batch * heads + head) * rows + row) * columns + column];
  }
};

int num_wrong = 0;

template <class Element>
void expect_close(const char* name, const Tensor<Element>& found, const Sums& expected, double tolerance) {
  double largest = 0.0, error = 0.0;
  for (size_t i = 0; i < expected.values.size(); ++i) {
    largest = std::fmax(largest, std::fabs(expected.values[i]));
    const double difference = std::fabs(static_cast<double>(found.elements[i]) - expected.values[i]);
    error = difference <= error ? error : difference;  // a NaN stays
  }
  if (error <= tolerance * largest) return;
  std::fprintf(stderr, "%s, %zu bytes an element: off by %g of %g\n", name, sizeof(Element), error, largest);
  ++num_wrong;
}

// The definition: P = softmax(S), O = P V, dS = P (dP - rowsum(dO O)), and the derivative of the softcap.
template <class Element>
struct Reference {
  Tensor<Element>&q, &k, &v, &dout;
  Sums out{kHeadsQ, kQueries, kDimV}, dq{kHeadsQ, kQueries, kDim}, dk{kHeadsK, kKeys, kDim}, dv{kHeadsK, kKeys, kDimV};

  void run() {
    for (int64_t b = 0; b < kBatch; ++b) {
      for (int64_t h = 0; h < kHeadsQ; ++h) {
        for (int64_t i = 0; i < kQueries; ++i) row(b, h, i);
      }
    }
  }

  void row(int64_t b, int64_t h, int64_t i) {
    const int64_t hk = h / (kHeadsQ / kHeadsK), keys = i + kKeys - kQueries + 1;
    std::vector<double> p(keys), slope(keys), dp(keys);
    double sum = 0.0, delta = 0.0;
    for (int64_t j = 0; j < keys; ++j) {
      double product = 0.0;
      for (int64_t d = 0; d < kDim; ++d) product += q.at(b, h, i, d) * k.at(b, hk, j, d);
      const double t = std::tanh(kScale * product / kSoftcap);
      slope[j] = kScale * (1.0 - t * t);
      sum += p[j] = std::exp(kSoftcap * t);
    }
    for (int64_t j = 0; j < keys; ++j) {
      p[j] /= sum;
      for (int64_t d = 0; d < kDimV; ++d) {
        out.at(b, h, i, d) += p[j] * v.at(b, hk, j, d);
        dv.at(b, hk, j, d) += p[j] * dout.at(b, h, i, d);
        dp[j] += dout.at(b, h, i, d) * v.at(b, hk, j, d);
      }
      delta += p[j] * dp[j];
    }
    for (int64_t j = 0; j < keys; ++j) {
      const double ds = p[j] * (dp[j] - delta) * slope[j];
      for (int64_t d = 0; d < kDim; ++d) {
        dq.at(b, h, i, d) += ds * k.at(b, hk, j, d);
        dk.at(b, hk, j, d) += ds * q.at(b, h, i, d);
      }
    }
  }
};

template <class Element>
void check(const library::Kernels& kernels, const library::Backend& cpu, ElementType type, double tolerance) {
  std::mt19937 random(1);
  Tensor<Element> q{kHeadsQ, kQueries, kDim}, k{kHeadsK, kKeys, kDim}, v{kHeadsK, kKeys, kDimV};
  Tensor<Element> out{kHeadsQ, kQueries, kDimV}, dout = out, dq = q, dk = k, dv = v;
  for (Tensor<Element>* tensor : {&q, &k, &v, &dout}) tensor->fill(random);
  std::vector<double> lse(kBatch * kHeadsQ * kQueries);  // as wide as any accumulate type

  attention::AppendingForwardParams forward;
  forward.element = type;
  forward.batch = kBatch;
  forward.num_heads_q = kHeadsQ;
  forward.num_heads_k = kHeadsK;
  forward.head_dim_qk = kDim;
  forward.head_dim_v = kDimV;
  forward.sequences = {nullptr, nullptr, kQueries, kKeys, kQueries, kKeys};
  forward.visibility.right = 0;
  forward.score_mod.scale = kScale;
  forward.score_mod.softcap = kSoftcap;
  forward.q = q.view();
  forward.k = k.view();
  forward.v = v.view();
  forward.out = out.view();
  forward.lse = {lse.data(), kHeadsQ * kQueries, kQueries};
  const plan::Limits limits;
  const library::PlannedForward forward_plan = cpu.plan_forward(forward, limits);
  cpu.forward(forward, *forward_plan.plan, nullptr, nullptr);
  kernels.free_forward(forward_plan.plan);

  attention::BackwardParams backward;
  static_cast<attention::AttentionParams&>(backward) = forward;
  backward.out = out.view();
  backward.dout = dout.view();
  backward.lse = forward.lse;
  backward.dq = dq.view();
  backward.dk = dk.view();
  backward.dv = dv.view();
  const library::PlannedBackward plan = cpu.plan_backward(backward, limits);
  std::vector<char> workspace(plan.workspace_bytes);
  cpu.backward(backward, *plan.plan, workspace.data(), nullptr);
  kernels.free_backward(plan.plan);

  Reference<Element> expected{q, k, v, dout};
  expected.run();
  expect_close("out", out, expected.out, tolerance);
  expect_close("dq", dq, expected.dq, tolerance);
  expect_close("dk", dk, expected.dk, tolerance);
  expect_close("dv", dv, expected.dv, tolerance);
}

int allocations_until_failure = -1;  // of this thread, the only one; negative: all succeed

// Calls attempt with its first allocation failing, then with its second, until it succeeds.
template <class Attempt>
void fail_each_allocation(const char* what, int least, const Attempt& attempt) {
  int failures = 0;
  while (true) {
    allocations_until_failure = failures;
    const bool succeeded = attempt();
    allocations_until_failure = -1;
    if (succeeded) break;
    ++failures;
  }
  if (failures < least) {
    ++num_wrong;
    std::printf("%s: %d failed allocations were seen, expected at least %d\n", what, failures, least);
  }
}

// Whether a function writes a text; otherwise it has to say that there was no memory, also where the text's receiver
// had none.
template <class Write>
bool writes_text(const Write& write) {
  std::string text;
  const auto append = [](void* context, const char* part) { static_cast<std::string*>(context)->append(part); };
  const library::Status status = write({.context = &text, .append = append});
  if (status != (text.empty() ? library::kNoMemory : 0)) {
    std::fprintf(stderr, "status %d, and a text of %zu bytes\n", status, text.size());
    ++num_wrong;
  }
  return status == 0;
}

void check_failed_allocations(const library::Kernels& kernels, const library::Backend& cpu) {
  float rows[kDim] = {};
  attention::BackwardParams params;
  params.batch = params.num_heads_q = params.num_heads_k = 1;
  params.head_dim_qk = params.head_dim_v = kDim;
  params.sequences = {nullptr, nullptr, 1, 1, 1, 1};
  const attention::MatrixView row = {rows, kDim, kDim, kDim, 1};
  params.q = params.k = params.v = params.out = params.dout = params.dq = row;
  params.lse = {rows, 1, 1};
  const plan::Limits limits;
  fail_each_allocation("plan_backward", 1, [&] {
    const library::PlannedBackward planned = cpu.plan_backward(params, limits);
    if (planned.plan) kernels.free_backward(planned.plan);
    return planned.plan != nullptr;
  });
  const library::PlannedBackward planned = cpu.plan_backward(params, limits);
  std::vector<char> workspace(planned.workspace_bytes);
  fail_each_allocation("backward", 1, [&] {
    return cpu.backward(params, *planned.plan, workspace.data(), nullptr) != library::kNoMemory;
  });
  fail_each_allocation("report_backward", 1, [&] {
    return writes_text([&](const library::TextSink& sink) { return kernels.report_backward(planned.plan, sink); });
  });
  fail_each_allocation("describe_backward", 1, [&] {
    return writes_text([&](const library::TextSink& sink) { return kernels.describe_backward(*planned.plan, sink); });
  });
  kernels.free_backward(planned.plan);
}

// The CUDA runtime inside says in words why a device cannot be used, with a driver and without one.
void check_missing_gpus(const library::GpuFunctions& gpus) {
  if (gpus.gpu == nullptr) return;
  for (const int device : {-1, 100, 100, 1000}) {
    const library::Status status = gpus.gpu(device).status;
    if (status != 0 && std::strlen(gpus.take_error(status)) > 0) continue;
    std::fprintf(stderr, "device %d: status %d\n", device, status);
    ++num_wrong;
  }
}

}  // namespace

// The library's allocations come here, too.
void* operator new(std::size_t bytes) {
  if (allocations_until_failure == 0) throw std::bad_alloc();
  if (allocations_until_failure > 0) --allocations_until_failure;
  if (void* memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

int main() {
  const library::Kernels& kernels = *flash_attn_ext_kernels(&kServices);
  check_missing_gpus(kernels.gpu);
  for (const library::Backend& backend : kernels.backends) {
    if (std::strcmp(backend.name, "cpu") != 0) continue;
    check<float>(kernels, backend, ElementType::kFloat32, 1e-5);
    check<double>(kernels, backend, ElementType::kFloat64, 1e-12);
    check<cpu::BFloat16>(kernels, backend, ElementType::kBFloat16, 2e-2);
    check<cpu::Float16>(kernels, backend, ElementType::kFloat16, 2e-3);
    check_failed_allocations(kernels, backend);
    return num_wrong != 0;
  }
  return 1;
}
