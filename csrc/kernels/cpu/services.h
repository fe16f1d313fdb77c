// What the CPU kernels take from the program that they run in, as function pointers: its threads, and its GEMM of
// bfloat16 if it has one. So they need no header of PyTorch, and no thread pool of their own beside its.
#pragma once

#include <cstdint>

namespace flash_attn_ext::cpu {

// c (m x n) = a (m x k) . b (k x n), row-major, added to c or not. Rows of a, b and c are lda, ldb and ldc elements
// apart.
template <class Element, class Sum>
struct GemmCall {
  int64_t m, n, k;
  const Element* a;
  int64_t lda;
  const Element* b;
  int64_t ldb;
  Sum* c;
  int64_t ldc;
  bool adds;
};

using BFloat16Gemm = GemmCall<uint16_t, float>;  // bits; rows of b are interleaved in pairs

struct Services {
  int64_t (*num_threads)();
  // Calls task(context, first, last) on several threads, for disjoint ranges that make up [0, count). Ranges have
  // about `grain` items or more.
  void (*parallel_for)(int64_t count, int64_t grain, void (*task)(void* context, int64_t first, int64_t last),
                       void* context);
  // A GEMM of bfloat16 of any shape that is not empty, and whether this CPU has it. A thread calls release_tiles after
  // its last one.
  bool (*has_tile_gemm_bf16)();
  void (*tile_gemm_bf16)(const BFloat16Gemm& call);
  void (*release_tiles)();
};

// Called once, before any kernel.
void set_services(const Services& services);

const Services& services();

// Calls function(first, last) as Services::parallel_for calls its task.
template <class Function>
void parallel_for(int64_t count, int64_t grain, const Function& function) {
  const auto task = [](void* context, int64_t first, int64_t last) {
    (*static_cast<const Function*>(context))(first, last);
  };
  services().parallel_for(count, grain, task, const_cast<Function*>(&function));
}

}  // namespace flash_attn_ext::cpu
