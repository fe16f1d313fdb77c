// Packs a mask of short rows: mask_bits has a bit for each query and key (attention::MaskBits).
//
// Grid: one thread for each word, with 16 keys of a query. The four threads of a query read neighbouring keys at a
// time. All loads of a thread are in flight together, whatever the alignment of the rows is.
#include "attention/division.h"
#include "kernels/common/launch/launch_early.cuh"
#include "kernels/common/masks/mask_tiles.h"
#include "kernels/plan/mask_tiles.h"
#include "ptx/dependent_launch.h"

namespace flash_attn_ext::common {
namespace {

using attention::Divisor;
using attention::MaskBits;

constexpr int kThreads = 256;
constexpr int kWords = 4;  // of a query
constexpr int kPairs = kShortMaskKeys / 8;

// The rows of the mask as it is stored (broadcast dimensions once), numbered by queries first, then heads.
struct MaskRows {
  uint32_t count;
  Divisor queries;
  Divisor heads;
};

__global__ void __launch_bounds__(kThreads) short_mask_bits_kernel(const __grid_constant__ attention::AttentionParams p,
                                                                   const __grid_constant__ MaskRows rows) {
  ptx::wait_for_kernel_before();
  ptx::allow_dependent_launch();
  const uint32_t index = blockIdx.x * kThreads + threadIdx.x;
  const uint32_t row = index / kWords;
  const int word = static_cast<int>(index % kWords);
  if (row >= rows.count) return;
  const uint32_t pair = rows.queries.quotient(row);
  const uint32_t query = row - pair * rows.queries.divisor;
  const uint32_t batch = rows.heads.quotient(pair);
  const uint32_t head = pair - batch * rows.heads.divisor;
  const attention::BroadcastView& mask = p.score_mod.mask;
  const auto* first = static_cast<const uint8_t*>(mask.data) + mask.offset({batch, head, query, 2 * word});
  const int keys = static_cast<int>(p.sequences.max_seqlen_k) - 2 * word;
  uint8_t bytes[kPairs][2];
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) bytes[j][e] = 8 * j + e < keys ? first[(8 * j + e) * mask.key_stride] : uint8_t{0};
  }
  uint32_t bits = 0;
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) bits |= bytes[j][e] != 0 ? 1u << (2 * j + e) : 0u;
  }
  const MaskBits& target = p.score_mod.mask_bits;
  target.data[batch * target.batch_stride + head * target.head_stride + query * target.query_stride + word] = bits;
}

}  // namespace

cudaError_t pack_short_mask(attention::AttentionParams& params, void* bits, cudaStream_t stream) {
  params.score_mod.mask_bits = plan::mask_bits_in(bits, params);
  const plan::MaskTileCounts counts = plan::count_mask_tiles(params);
  const int64_t queries = params.score_mod.mask.query_stride == 0 ? 1 : params.sequences.max_seqlen_q;
  const int64_t count = counts.batch * counts.heads * queries;
  if (count * kWords > INT32_MAX) return cudaErrorInvalidConfiguration;
  const auto divisor = [](int64_t n) { return Divisor::of(static_cast<uint32_t>(n)); };
  const MaskRows rows = {
      .count = static_cast<uint32_t>(count), .queries = divisor(queries), .heads = divisor(counts.heads)};
  return launch_early(short_mask_bits_kernel,
                      {.blocks = attention::ceil_div(count * kWords, kThreads), .threads = kThreads}, stream, params,
                      rows);
}

}  // namespace flash_attn_ext::common
