#include "host/library/cpu_services.h"

#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <c10/util/BFloat16.h>

#include <exception>

namespace flash_attn_ext::host {
namespace {

int64_t num_threads() { return at::get_num_threads(); }

void parallel_for(int64_t count, int64_t grain, void (*task)(void* context, int64_t first, int64_t last),
                  void* context) {
  at::parallel_for(0, count, grain, [&](int64_t first, int64_t last) { task(context, first, last); });
}

// oneDNN's, generated for the shape.
void tile_gemm_bf16(const cpu::BFloat16Gemm& call) {
  at::native::cpublas::brgemm(call.m, call.n, call.k, call.lda, call.ldb, call.ldc, call.adds,
                              reinterpret_cast<const c10::BFloat16*>(call.a),
                              reinterpret_cast<const c10::BFloat16*>(call.b), call.c, /*is_vnni=*/true);
}

void release_tiles() { at::native::cpublas::brgemm_release(/*is_vnni=*/true); }

// It exists only for CPUs with instructions for it; trying is the only way to know.
bool has_tile_gemm_bf16() {
  const uint16_t a[2] = {}, b[2] = {};
  float c = 0.0f;
  try {
    tile_gemm_bf16({.m = 1, .n = 1, .k = 2, .a = a, .lda = 2, .b = b, .ldb = 1, .c = &c, .ldc = 1, .adds = false});
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

}  // namespace

cpu::Services services_of_torch() {
  return {.num_threads = num_threads,
          .parallel_for = parallel_for,
          .has_tile_gemm_bf16 = has_tile_gemm_bf16,
          .tile_gemm_bf16 = tile_gemm_bf16,
          .release_tiles = release_tiles};
}

}  // namespace flash_attn_ext::host
