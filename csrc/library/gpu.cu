#include <cuda_runtime_api.h>

#include <cstring>

#include "attention/aligned_bias.h"
#include "attention/unwanted_gradients.h"
#include "kernels/common/cache/append_kv.h"
#include "kernels/common/masks/aligned_bias.h"
#include "kernels/common/masks/mask_tiles.h"
#include "kernels/common/sums/sums.h"
#include "kernels/derivatives/plain_tiles.h"
#include "kernels/sm80/sm80_backend.h"
#if FLASH_ATTN_EXT_WITH_SM90
#include "kernels/sm90/sm90_backend.h"
#endif
#include "library/gpu_code.h"
#include "library/gpu_descriptions.h"
#include "library/table.h"

namespace flash_attn_ext::library {
namespace {

cudaStream_t cuda_stream(void* stream) { return static_cast<cudaStream_t>(stream); }

Gpu describe_gpu(int device) {
  Gpu gpu{};
  cudaDeviceProp properties;
  gpu.status = cudaGetDeviceProperties(&properties, device);
  if (gpu.status != cudaSuccess) {
    static_cast<void>(cudaGetLastError());  // otherwise the next launch would return it
    return gpu;
  }
  std::strncpy(gpu.name, properties.name, sizeof(gpu.name) - 1);
  gpu.major = properties.major;
  gpu.minor = properties.minor;
  gpu.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  gpu.l2_bytes = properties.l2CacheSize;
  gpu.sms = properties.multiProcessorCount;
  gpu.has_code = code_for(gpu.major, gpu.minor, FLASH_ATTN_EXT_CUDA_ARCHS) != nullptr;
  return gpu;
}

const Gpu& gpu(int device) {
  static GpuDescriptions descriptions;
  static const Gpu kNoDevice = {.status = cudaErrorInvalidDevice};
  if (device < 0 || device >= GpuDescriptions::kMost) return kNoDevice;
  return descriptions.of(device, [&] { return describe_gpu(device); });
}

const char* take_error(Status status) {
  static_cast<void>(cudaGetLastError());
  return cudaGetErrorString(static_cast<cudaError_t>(status));
}

Status append(const attention::AppendParams& params, void* stream) {
  return common::append_kv(params, cuda_stream(stream));
}

Status delta(const attention::DeltaParams& params, void* stream) {
  return common::launch_delta(params, cuda_stream(stream));
}

Status tangents(const attention::TangentParams& params, const plan::TangentPlan& plan, void* stream) {
  return sm80::run_tangents(params, plan, cuda_stream(stream));
}

Status plain_weights(const derivatives::PlainTile& tile, const derivatives::PlainWeights& results, void* stream) {
  return derivatives::plain_weights(tile, results, cuda_stream(stream));
}

Status plain_gradients(const derivatives::PlainTile& tile, const derivatives::PlainGradients& gradients, void* stream) {
  return derivatives::plain_gradients(tile, gradients, cuda_stream(stream));
}

Status look_up(const common::TableLookUp& table, void* stream) {
  return common::launch_look_up(table, cuda_stream(stream));
}

Status table_sums(const common::TableSums& table, void* stream) {
  return common::launch_table_sums(table, cuda_stream(stream));
}

Status block_mask(const common::BlockMaskOfLists& mask, void* stream) {
  return common::launch_block_mask(mask, cuda_stream(stream));
}

Status sm80_forward(const attention::AppendingForwardParams& params, const plan::ForwardPlan& plan, void* workspace,
                    void* stream) {
  return sm80::run_forward(params, plan, workspace, cuda_stream(stream));
}

Status sm80_backward(const attention::BackwardParams& params, const plan::BackwardPlan& plan, void* workspace,
                     void* stream) {
  return sm80::run_backward(params, plan, workspace, cuda_stream(stream));
}

#if FLASH_ATTN_EXT_WITH_SM90
// Copies a bias that kernels cannot read where it is, if the plan has memory for it.
template <class Params, class Plan>
cudaError_t align_bias(Params& p, const Plan& plan, void* workspace, void* stream) {
  void* const copy = plan.workspace.aligned_bias.template in<void>(workspace);
  if (copy == nullptr) return cudaSuccess;
  const cudaError_t error = common::write_aligned_bias(p, copy, cuda_stream(stream));
  p = attention::with_aligned_bias(p, copy);
  return error;
}

Status sm90_forward(const attention::AppendingForwardParams& params, const plan::ForwardPlan& plan, void* workspace,
                    void* stream) {
  attention::AppendingForwardParams p = params;
  cudaError_t error = align_bias(p, plan, workspace, stream);
  if (error != cudaSuccess) return error;
  if (!plan.is_warp_specialised()) return sm80_forward(p, plan, workspace, stream);
  if (p.append.present()) error = common::append_kv(p.append, cuda_stream(stream));
  if (error != cudaSuccess) return error;
  return sm90::run_forward(p, plan, workspace, cuda_stream(stream));
}

Status sm90_backward(const attention::BackwardParams& params, const plan::BackwardPlan& plan, void* workspace,
                     void* stream) {
  attention::BackwardParams p = params;
  cudaError_t error = align_bias(p, plan, workspace, stream);
  if (error != cudaSuccess) return error;
  if (!plan.is_warp_specialised()) return sm80_backward(p, plan, workspace, stream);
  if (void* const unwanted = plan.workspace.unwanted_gradient.in<void>(workspace)) {
    p = attention::with_unwanted_gradient(p, unwanted);
  }
  error = sm90::run_backward(p, plan, workspace, cuda_stream(stream));
  if (error == cudaSuccess) error = sm80::run_separate_sums(p, plan, workspace, cuda_stream(stream));
  if (error != cudaSuccess || p.dsink == nullptr) return error;
  p.delta = plan.workspace.delta.like(p.lse, workspace);
  return common::launch_dsink(p, cuda_stream(stream));  // last, since it overwrites delta
}
#endif

}  // namespace

void add_gpu_kernels(Kernels& table) {
  table.gpu = {.gpu = gpu,
               .take_error = take_error,
               .tangents = tangents,
               .plain_weights = plain_weights,
               .plain_gradients = plain_gradients,
               .look_up = look_up,
               .table_sums = table_sums,
               .block_mask = block_mask};
  Backend& sm80 = table.backends[kSm80];
  sm80.append = append;
  sm80.forward = sm80_forward;
  sm80.backward = sm80_backward;
  sm80.delta = delta;
#if FLASH_ATTN_EXT_WITH_SM90
  Backend& sm90 = table.backends[kSm90];
  sm90.append = append;
  sm90.forward = sm90_forward;
  sm90.backward = sm90_backward;
  sm90.delta = delta;
#endif
}

}  // namespace flash_attn_ext::library
