// mask_bits = the mask, a bit for each query and key (attention::MaskBits).
//
// Grid: one thread per query and group of 128 keys of the mask as it is stored (broadcast dimensions once), and one for
// the group behind each query's last. Bound: memory; every byte of the mask is read once.
#include "kernels/common/mask_tiles.h"
#include "kernels/plan/mask_tiles.h"

namespace flash_attn_ext::common {
namespace {

using attention::MaskBits;

constexpr int kThreads = 128;
constexpr int kVectorBytes = 16;

// Of 8 keys, bytes that are 0 or 1: key 2 t + e becomes bit 2 j + e of word t.
__device__ __forceinline__ void add_keys(uint32_t (&words)[4], uint2 bytes, int j) {
  const uint32_t halves[4] = {bytes.x & 0xFFFFu, bytes.x >> 16, bytes.y & 0xFFFFu, bytes.y >> 16};
#pragma unroll
  for (int t = 0; t < 4; ++t) words[t] |= ((halves[t] | halves[t] >> 7) & 3u) << (2 * j);
}

__global__ void __launch_bounds__(kThreads) mask_bits_kernel(const __grid_constant__ attention::AttentionParams p,
                                                             uint32_t groups, uint32_t rows, uint32_t heads) {
  const MaskBits& bits = p.score_mod.mask_bits;
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index * 4 >= bits.words) return;
  const auto row = static_cast<uint32_t>(index / groups);
  const int64_t first_key = (index - int64_t{row} * groups) * MaskBits::kKeys;
  const uint32_t head = row / rows;
  const attention::BroadcastView& mask = p.score_mod.mask;
  const uint8_t* first =
      static_cast<const uint8_t*>(mask.data) + mask.offset({head / heads, head % heads, row - head * rows, first_key});
  const auto keys = static_cast<int>(min(p.sequences.max_seqlen_k - first_key, MaskBits::kKeys));
  uint32_t words[4] = {};
  if (mask.key_stride == 1 && keys == MaskBits::kKeys && reinterpret_cast<uintptr_t>(first) % kVectorBytes == 0) {
#pragma unroll
    for (int i = 0; i < MaskBits::kKeys / kVectorBytes; ++i) {
      const uint4 bytes = reinterpret_cast<const uint4*>(first)[i];
      add_keys(words, {bytes.x, bytes.y}, 2 * i);
      add_keys(words, {bytes.z, bytes.w}, 2 * i + 1);
    }
  } else {
    for (int key = 0; key < keys; ++key) {
      const uint32_t attend = first[key * mask.key_stride] != 0;
      const uint32_t bit = attend << (key / 8 * 2 + key % 2);
#pragma unroll
      for (int t = 0; t < 4; ++t) words[t] |= key % 8 / 2 == t ? bit : 0;
    }
  }
  reinterpret_cast<uint4*>(bits.data)[index] = {words[0], words[1], words[2], words[3]};
}

}  // namespace

cudaError_t pack_mask(attention::AttentionParams& params, void* memory, cudaStream_t stream) {
  if (memory == nullptr) return cudaSuccess;
  const MaskBits bits = plan::mask_bits_in(memory, params);
  params.score_mod.mask_bits = bits;
  const plan::MaskTileCounts counts = plan::count_mask_tiles(params);
  const int64_t groups = (params.sequences.max_seqlen_k + MaskBits::kKeys - 1) / MaskBits::kKeys + 1;
  const int64_t rows = bits.query_stride == 0 ? 1 : params.sequences.max_seqlen_q;
  const int64_t blocks = (bits.words / 4 + kThreads - 1) / kThreads;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  mask_bits_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      params, static_cast<uint32_t>(groups), static_cast<uint32_t>(rows), static_cast<uint32_t>(counts.heads));
  return cudaGetLastError();
}

}  // namespace flash_attn_ext::common
