// Writes the boxes of a relative-position bias (schedule/relative_bias_boxes.h).
//
// Grid: one CTA for each kRowsOfCta rows of the boxes of a head. A thread reads the values that 8 neighbouring columns
// of these rows hold, and writes 16 bytes of each row. Bound: memory, the writes.
#include "kernels/schedule/relative_bias_boxes.h"
#include "kernels/sm90/sm90_kernels.h"

namespace flash_attn_ext::sm90 {
namespace {

constexpr int kThreads = 128;
constexpr int kRowsOfCta = 8;
constexpr int kCtasOfHead = RelativeBiasBoxes::kRows / kRowsOfCta;

__global__ void __launch_bounds__(kThreads)
    write_relative_bias_boxes_kernel(const __grid_constant__ attention::AttentionParams p, RelativeBiasBoxes boxes,
                                     uint4* to) {
  constexpr int kChunk = static_cast<int>(RelativeBiasBoxes::kChunk);
  const auto head = static_cast<int>(blockIdx.x) / kCtasOfHead;
  const int first_row = static_cast<int>(blockIdx.x) % kCtasOfHead * kRowsOfCta;
  const attention::BroadcastView& bias = p.score_mod.bias;
  const auto* values = static_cast<const uint16_t*>(bias.data) + head * bias.head_stride;
  const int first = 1 - static_cast<int>(p.sequences.max_seqlen_q);
  const int last = static_cast<int>(p.sequences.max_seqlen_k) - 1;
  const auto chunks = static_cast<int>(boxes.columns / kChunk);
  uint4* const rows = to + (int64_t{head} * RelativeBiasBoxes::kRows + first_row) * chunks;
  for (int chunk = static_cast<int>(threadIdx.x); chunk < chunks; chunk += kThreads) {
    // The values from that of the chunk's first column in the last row to that of its last column in the first.
    uint32_t read[kChunk + kRowsOfCta - 1];
    const int lowest = chunk * kChunk - boxes.first_column - first_row - (kRowsOfCta - 1);
#pragma unroll
    for (int i = 0; i < kChunk + kRowsOfCta - 1; ++i) {
      // Pairs that do not exist get the value of one that does.
      read[i] = values[min(max(lowest + i, first), last)];
    }
#pragma unroll
    for (int row = 0; row < kRowsOfCta; ++row) {
      const uint32_t* const own = read + kRowsOfCta - 1 - row;
      rows[int64_t{row} * chunks + chunk] = {own[0] | own[1] << 16, own[2] | own[3] << 16, own[4] | own[5] << 16,
                                             own[6] | own[7] << 16};
    }
  }
}

}  // namespace

cudaError_t write_relative_bias_boxes(const attention::AttentionParams& p, void* to, cudaStream_t stream) {
  const RelativeBiasBoxes boxes = relative_bias_boxes(p);
  const int64_t blocks = boxes.heads * kCtasOfHead;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  write_relative_bias_boxes_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p, boxes,
                                                                                           static_cast<uint4*>(to));
  return cudaGetLastError();
}

}  // namespace flash_attn_ext::sm90
