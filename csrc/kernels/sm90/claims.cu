#include <atomic>

#include "kernels/sm90/claims.h"

namespace flash_attn_ext::sm90 {
namespace {

constexpr uint32_t kTurns = 1u << 16;
constexpr uint32_t kCaptured = 1u << 20;

__device__ uint32_t claim_counters[kTurns + kCaptured];  // zeros when the module is loaded

}  // namespace

cudaError_t next_claim_counter(uint32_t*& counter, cudaStream_t stream) {
  static std::atomic<uint32_t> turn{0};
  static std::atomic<uint32_t> captured{0};
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  void* counters = nullptr;
  cudaError_t error = cudaStreamIsCapturing(stream, &status);
  if (error == cudaSuccess) error = cudaGetSymbolAddress(&counters, claim_counters);
  if (error != cudaSuccess) return error;
  uint32_t index = turn.fetch_add(1, std::memory_order_relaxed) % kTurns;
  if (status != cudaStreamCaptureStatusNone) {
    index = captured.fetch_add(1, std::memory_order_relaxed);
    if (index >= kCaptured) return cudaErrorMemoryAllocation;
    index += kTurns;
  }
  counter = static_cast<uint32_t*>(counters) + index;
  return cudaSuccess;
}

}  // namespace flash_attn_ext::sm90
