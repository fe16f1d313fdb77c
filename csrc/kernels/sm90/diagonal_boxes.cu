// Writes the boxes of a bias with one number for each diagonal (schedule/diagonal_boxes.h).
//
// Grid: one CTA for each row of the boxes. A thread writes 16 bytes at a time. Bound: memory, the writes.
#include "kernels/schedule/diagonal_boxes.h"
#include "kernels/sm90/sm90_kernels.h"

namespace flash_attn_ext::sm90 {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    write_boxes_kernel(const __grid_constant__ attention::AttentionParams p, DiagonalBoxes boxes, uint4* to) {
  const auto row = static_cast<int>(blockIdx.x) % DiagonalBoxes::kRows;
  const auto head = static_cast<int>(blockIdx.x) / DiagonalBoxes::kRows;
  const attention::BroadcastView& bias = p.score_mod.bias;
  const auto* numbers = static_cast<const uint16_t*>(bias.data) + head * bias.head_stride;
  const int first = 1 - static_cast<int>(p.sequences.max_seqlen_q);
  const int last = static_cast<int>(p.sequences.max_seqlen_k) - 1;
  const auto chunks = static_cast<int>(boxes.columns / DiagonalBoxes::kChunk);
  for (int chunk = static_cast<int>(threadIdx.x); chunk < chunks; chunk += kThreads) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t word = 0;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = chunk * static_cast<int>(DiagonalBoxes::kChunk) + 2 * i + e;
        // Pairs that do not exist get the number of one that does.
        const int diagonal = min(max(column - boxes.first_column - row, first), last);
        word |= uint32_t{numbers[diagonal]} << (16 * e);
      }
      words[i] = word;
    }
    to[blockIdx.x * int64_t{chunks} + chunk] = {words[0], words[1], words[2], words[3]};
  }
}

}  // namespace

cudaError_t write_boxes(const attention::AttentionParams& p, void* to, cudaStream_t stream) {
  const DiagonalBoxes boxes = diagonal_boxes(p);
  const int64_t blocks = boxes.heads * DiagonalBoxes::kRows;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  write_boxes_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p, boxes, static_cast<uint4*>(to));
  return cudaGetLastError();
}

}  // namespace flash_attn_ext::sm90
