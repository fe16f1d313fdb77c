// Scans a mask that hides the same keys from all queries and heads: finds out whether it leaves one interval of keys
// (attention::KeyInterval), and writes what pack_mask does for any mask.
//
// Grid: one CTA for each row of the mask as it is stored. A thread has 128 keys at a time, as in mask_bits.cu. The
// kernel is bound by the latency of one access to memory.
#include "attention/division.h"
#include "kernels/common/launch/launch_early.cuh"
#include "kernels/common/masks/mask_group.cuh"
#include "kernels/common/masks/mask_tiles.h"
#include "kernels/plan/mask_tiles.h"
#include "ptx/dependent_launch.h"

namespace flash_attn_ext::common {
namespace {

using attention::MaskBits;

constexpr int kThreads = 256;
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

// The keys that a mask does not hide.
struct KeysLeft {
  int first = INT32_MAX;
  int last = -1;
  int count = 0;

  __device__ __forceinline__ void add(const GroupBits& group, int first_key) {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const uint32_t word = group.words[t];
      if (word == 0) continue;
      first = min(first, first_key + key_of(t, __ffs(static_cast<int>(word)) - 1));
      last = max(last, first_key + key_of(t, 31 - __clz(static_cast<int>(word))));
      count += __popc(word);
    }
  }

  __device__ __forceinline__ KeysLeft over_warp() const {
    return {.first = __reduce_min_sync(kAllLanes, first),
            .last = __reduce_max_sync(kAllLanes, last),
            .count = __reduce_add_sync(kAllLanes, count)};
  }

  __device__ __forceinline__ void join(const KeysLeft& other) {
    first = min(first, other.first);
    last = max(last, other.last);
    count += other.count;
  }

  __device__ __forceinline__ attention::KeyInterval interval(bool from_first_key) const {
    if (count == 0) return {0, 0};
    const bool is_interval = last - first + 1 == count && (first == 0 || !from_first_key);
    return {first, is_interval ? count : attention::KeyInterval::kNone};
  }

 private:
  __device__ __forceinline__ static int key_of(int t, int bit) { return bit / 2 * 8 + 2 * t + bit % 2; }
};

struct KeyMaskArguments {
  attention::AttentionParams params;
  attention::KeyInterval* intervals;
  int groups;  // of keys in a row
  int key_tiles;
};

__global__ void __launch_bounds__(kThreads) key_mask_kernel(const __grid_constant__ KeyMaskArguments args) {
  __shared__ KeysLeft left_of_warps[kThreads / 32];
  ptx::wait_for_kernel_before();
  ptx::allow_dependent_launch();
  const attention::AttentionParams& p = args.params;
  const attention::BroadcastView& mask = p.score_mod.mask;
  const auto* const row = static_cast<const uint8_t*>(mask.data) + mask.offset({blockIdx.x, 0, 0, 0});
  const auto num_keys = static_cast<int>(p.sequences.max_seqlen_k);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  KeysLeft left;
#pragma unroll 1
  for (int first = warp * 32; first < args.groups; first += kThreads) {
    const int group = first + lane;
    const int first_key = group * static_cast<int>(MaskBits::kKeys);
    const bool exists = group < args.groups;
    GroupBits bits;
    bits.read({.first = row + first_key * mask.key_stride,
               .key_stride = mask.key_stride,
               .keys = exists ? min(num_keys - first_key, static_cast<int>(MaskBits::kKeys)) : 0});
    if (!exists) continue;
    left.add(bits, first_key);
    if (p.score_mod.mask_bits.present()) {
      reinterpret_cast<uint4*>(p.score_mod.mask_bits.data)[int64_t{blockIdx.x} * args.groups + group] = {
          bits.words[0], bits.words[1], bits.words[2], bits.words[3]};
    }
    const uint32_t flags = bits.tile_flags();
    for (int i = 0; i < 2 && 2 * group + i < args.key_tiles; ++i) {
      p.score_mod.mask_tiles.data[int64_t{blockIdx.x} * args.key_tiles + 2 * group + i] =
          static_cast<uint8_t>(flags >> (8 * i));
    }
  }
  left = left.over_warp();
  if (lane == 0) left_of_warps[warp] = left;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kThreads / 32; ++w) left.join(left_of_warps[w]);
  args.intervals[blockIdx.x] = left.interval(p.dropout.enabled());
}

}  // namespace

cudaError_t scan_key_mask(attention::AttentionParams& params, const KeyMaskMemory& memory, cudaStream_t stream) {
  params.score_mod.mask_tiles = plan::mask_tiles_in(memory.tiles, params);
  if (memory.bits != nullptr) params.score_mod.mask_bits = plan::mask_bits_in(memory.bits, params);
  const plan::MaskTileCounts counts = plan::count_mask_tiles(params);
  const int64_t groups = attention::ceil_div(params.sequences.max_seqlen_k, MaskBits::kKeys) + 1;
  const KeyMaskArguments args = {.params = params,
                                 .intervals = memory.intervals,
                                 .groups = static_cast<int>(groups),
                                 .key_tiles = static_cast<int>(counts.keys)};
  return launch_early(key_mask_kernel, {.blocks = counts.batch, .threads = kThreads}, stream, args);
}

}  // namespace flash_attn_ext::common
