// Copies a bias into rows that begin at multiples of 16 bytes (attention/aligned_bias.h).
//
// Grid: a thread for each chunk of 16 bytes of the copy. Neighbouring threads have neighbouring keys, or heads where
// these are closer together in memory, as in the output of an embedding of relative positions. Bound: memory.
#include "attention/aligned_bias.h"
#include "attention/division.h"
#include "kernels/common/launch/launch_early.cuh"
#include "kernels/common/masks/aligned_bias.h"
#include "ptx/dependent_launch.h"

namespace flash_attn_ext::common {
namespace {

constexpr int kThreads = 256;

struct BiasCopy {
  attention::BroadcastView from;
  uint4* to;
  int64_t num_keys;
  uint32_t chunks;  // of all rows
  bool heads_first;
  attention::Divisor heads;
  attention::Divisor queries;
  attention::Divisor row_chunks;

  // The chunk of a thread, and its place in the copy.
  __device__ __forceinline__ attention::Coordinate find(uint32_t thread, int64_t& place) const {
    uint32_t rest = thread;
    const auto next = [&](const attention::Divisor& size) {
      const uint32_t index = rest - size.quotient(rest) * size.divisor;
      rest = size.quotient(rest);
      return index;
    };
    uint32_t head = heads_first ? next(heads) : 0;
    const uint32_t chunk = next(row_chunks);
    const uint32_t query = next(queries);
    if (!heads_first) head = next(heads);
    place = ((int64_t{rest} * heads.divisor + head) * queries.divisor + query) * row_chunks.divisor + chunk;
    return {rest, head, query, int64_t{chunk} * attention::AlignedBias::kChunk};
  }
};

__global__ void __launch_bounds__(kThreads) write_aligned_bias_kernel(const __grid_constant__ BiasCopy copy) {
  ptx::wait_for_kernel_before();
  ptx::allow_dependent_launch();
  const uint32_t thread = blockIdx.x * kThreads + threadIdx.x;
  if (thread >= copy.chunks) return;
  int64_t place;
  const attention::Coordinate at = copy.find(thread, place);
  const auto* const from = static_cast<const uint16_t*>(copy.from.data) + copy.from.offset(at);
  uint32_t elements[attention::AlignedBias::kChunk];
#pragma unroll
  for (int i = 0; i < attention::AlignedBias::kChunk; ++i) {
    elements[i] = at.key + i < copy.num_keys ? from[i * copy.from.key_stride] : 0;
  }
  copy.to[place] = {elements[0] | elements[1] << 16, elements[2] | elements[3] << 16, elements[4] | elements[5] << 16,
                    elements[6] | elements[7] << 16};
}

}  // namespace

cudaError_t write_aligned_bias(const attention::AttentionParams& p, void* to, cudaStream_t stream) {
  const attention::AlignedBias shape = attention::AlignedBias::of(p);
  const attention::BroadcastView& bias = p.score_mod.bias;
  if (shape.chunks() == 0) return cudaSuccess;
  const BiasCopy copy = {.from = bias,
                         .to = static_cast<uint4*>(to),
                         .num_keys = p.sequences.max_seqlen_k,
                         .chunks = static_cast<uint32_t>(shape.chunks()),
                         .heads_first = shape.heads > 1 && bias.head_stride < bias.key_stride,
                         .heads = attention::Divisor::of(static_cast<uint32_t>(shape.heads)),
                         .queries = attention::Divisor::of(static_cast<uint32_t>(shape.queries)),
                         .row_chunks = attention::Divisor::of(static_cast<uint32_t>(shape.row_chunks))};
  const EarlyLaunch launch = {.blocks = attention::ceil_div(shape.chunks(), kThreads), .threads = kThreads};
  return launch_early(write_aligned_bias_kernel, launch, stream, copy);
}

}  // namespace flash_attn_ext::common
