#include <atomic>

#include "kernels/sm90/tile_scheduler.cuh"

namespace flash_attn_ext::sm90 {
namespace {

constexpr uint32_t kInRotation = 1u << 16;
constexpr uint32_t kCaptured = 1u << 20;

__device__ uint32_t work_counters[kInRotation + kCaptured];  // zeros when the module is loaded

}  // namespace

cudaError_t next_work_counter(uint32_t*& counter, cudaStream_t stream) {
  static std::atomic<uint32_t> next{0};
  static std::atomic<uint32_t> captured{0};
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  void* counters = nullptr;
  cudaError_t error = cudaStreamIsCapturing(stream, &status);
  if (error == cudaSuccess) error = cudaGetSymbolAddress(&counters, work_counters);
  if (error != cudaSuccess) return error;
  uint32_t index = next.fetch_add(1, std::memory_order_relaxed) % kInRotation;
  if (status != cudaStreamCaptureStatusNone) {
    index = captured.fetch_add(1, std::memory_order_relaxed);
    if (index >= kCaptured) return cudaErrorMemoryAllocation;
    index += kInRotation;
  }
  counter = static_cast<uint32_t*>(counters) + index;
  return cudaSuccess;
}

}  // namespace flash_attn_ext::sm90
