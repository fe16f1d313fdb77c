#include "host/library/cpu_services.h"

#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>
#include <c10/core/GradMode.h>
#include <c10/util/BFloat16.h>

#include <exception>

namespace flash_attn_ext::host {
namespace {

int64_t num_threads() { return at::get_num_threads(); }

void parallel_for(int64_t count, int64_t grain, void (*task)(void* context, int64_t first, int64_t last),
                  void* context) {
  at::parallel_for(0, count, grain, [&](int64_t first, int64_t last) { task(context, first, last); });
}

template <class Real>
void gemm(const cpu::GemmCall<Real, Real>& call) {
  const c10::NoGradGuard no_grad;
  const auto options = at::TensorOptions().dtype(c10::CppTypeToScalarType<Real>::value);
  const auto view = [&](const Real* data, int64_t rows, int64_t columns, int64_t stride) {
    return at::from_blob(const_cast<Real*>(data), {rows, columns}, {stride, 1}, options);
  };
  at::Tensor out = view(call.c, call.m, call.n, call.ldc);
  const at::Tensor left = view(call.a, call.m, call.k, call.lda);
  const at::Tensor right = view(call.b, call.k, call.n, call.ldb);
  if (call.adds) {
    out.addmm_(left, right);
  } else {
    at::mm_out(out, left, right);
  }
}

// oneDNN's, generated for the shape.
void tile_gemm_f32(const cpu::Float32Gemm& call) {
  at::native::cpublas::brgemm(call.m, call.n, call.k, call.lda, call.ldb, call.ldc, call.adds, call.a, call.b, call.c,
                              /*is_vnni=*/false);
}

void tile_gemm_bf16(const cpu::BFloat16Gemm& call) {
  at::native::cpublas::brgemm(call.m, call.n, call.k, call.lda, call.ldb, call.ldc, call.adds,
                              reinterpret_cast<const c10::BFloat16*>(call.a),
                              reinterpret_cast<const c10::BFloat16*>(call.b), call.c, /*is_vnni=*/true);
}

void release_tiles() { at::native::cpublas::brgemm_release(/*is_vnni=*/true); }

// It exists only for CPUs with AVX-512, and that of bfloat16 for those with instructions for it; trying is the only way
// to know.
template <class Element, void (*tile_gemm)(const cpu::GemmCall<Element, float>&)>
bool has_tile_gemm() {
  const Element a[2] = {}, b[2] = {};
  float c = 0.0f;
  try {
    tile_gemm({.m = 1, .n = 1, .k = 2, .a = a, .lda = 2, .b = b, .ldb = 1, .c = &c, .ldc = 1, .adds = false});
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

}  // namespace

cpu::Services services_of_torch() {
  return {.num_threads = num_threads,
          .parallel_for = parallel_for,
          .gemm_f32 = gemm<float>,
          .gemm_f64 = gemm<double>,
          .has_tile_gemm_f32 = has_tile_gemm<float, tile_gemm_f32>,
          .has_tile_gemm_bf16 = has_tile_gemm<uint16_t, tile_gemm_bf16>,
          .tile_gemm_f32 = tile_gemm_f32,
          .tile_gemm_bf16 = tile_gemm_bf16,
          .release_tiles = release_tiles};
}

}  // namespace flash_attn_ext::host
