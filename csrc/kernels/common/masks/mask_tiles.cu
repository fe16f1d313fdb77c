// mask_tiles says whether each tile of the mask has a True and whether it has a False.
//
// Grid: one warp per tile of 64 queries x 64 keys of the mask as it is stored (broadcast dimensions once). Lanes read
// neighbouring keys, 16 bytes each where the mask allows it. The kernel is memory-bound: every byte of the mask is read
// once.
#include "attention/division.h"
#include "kernels/common/launch/launch_early.cuh"
#include "kernels/common/masks/mask_tiles.h"
#include "kernels/plan/mask_tiles.h"
#include "ptx/dependent_launch.h"

namespace flash_attn_ext::common {
namespace {

using attention::MaskTiles;
using plan::MaskTileCounts;

constexpr int kWarpSize = 32;
constexpr int kWarpsPerBlock = 8;
constexpr int kVectorBytes = 16;

// The flags of 4 keys. Bytes of a bool tensor are 0 or 1, so one comparison covers all four.
__device__ __forceinline__ uint8_t flags_of(uint32_t four) {
  return (four != 0 ? MaskTiles::kSomeTrue : 0) | (four != 0x01010101u ? MaskTiles::kSomeFalse : 0);
}

__device__ __forceinline__ uint8_t look_at_vectors(const uint8_t* first, int64_t row_stride, int rows) {
  constexpr int kLanesPerRow = static_cast<int>(MaskTiles::kSize) / kVectorBytes;
  uint8_t flags = 0;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  for (int row = lane / kLanesPerRow; row < rows; row += kWarpSize / kLanesPerRow) {
    const uint4 bytes = *reinterpret_cast<const uint4*>(first + row * row_stride + lane % kLanesPerRow * kVectorBytes);
    flags |= flags_of(bytes.x) | flags_of(bytes.y) | flags_of(bytes.z) | flags_of(bytes.w);
  }
  return flags;
}

// The flags of the lane's keys of a tile that begins at `first`, where intervals or blocks hide keys beside the mask.
__device__ __forceinline__ uint8_t look_at_both(const attention::AttentionParams& p, const attention::Coordinate& first,
                                                int lane) {
  const attention::BroadcastView& mask = p.score_mod.mask;
  const attention::Sequence sequence = p.sequence_of(first.batch);
  const int64_t query_end = min(first.query + MaskTiles::kSize, sequence.num_queries);
  const int64_t key_end = min(first.key + MaskTiles::kSize, sequence.num_keys);
  const attention::RowIntervals& intervals = p.score_mod.intervals;
  const attention::BlockMask& blocks = p.score_mod.blocks;
  if (blocks.present() && !blocks.sees(blocks.row(first.batch, first.head, first.query), first.key))
    return MaskTiles::kSomeFalse;
  uint8_t flags = 0;
  for (attention::Coordinate at = first; at.query < query_end; ++at.query) {
    const int32_t* row = intervals.present() ? intervals.row(sequence, first.head, at.query) : nullptr;
    for (at.key = first.key + lane; at.key < key_end; at.key += kWarpSize) {
      const bool attend = static_cast<const uint8_t*>(mask.data)[mask.offset(at)] != 0 &&
                          (row == nullptr || intervals.sees(row, at.key));
      flags |= attend ? MaskTiles::kSomeTrue : MaskTiles::kSomeFalse;
    }
  }
  return flags;
}

__global__ void __launch_bounds__(kWarpsPerBlock* kWarpSize)
    mask_tiles_kernel(const __grid_constant__ attention::AttentionParams p, const MaskTileCounts counts) {
  ptx::wait_for_kernel_before();
  ptx::allow_dependent_launch();
  int64_t index = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.x / kWarpSize;
  if (index >= counts.total()) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int64_t first_key = index % counts.keys * MaskTiles::kSize;
  index /= counts.keys;
  const int64_t first_query = index % counts.queries * MaskTiles::kSize;
  index /= counts.queries;
  const int64_t batch = index / counts.heads;
  const int64_t head = index % counts.heads;
  const attention::BroadcastView& mask = p.score_mod.mask;
  const bool selects_keys = p.score_mod.selects_keys();
  const bool per_query = mask.query_stride != 0;
  const bool per_key = mask.key_stride != 0;
  const int rows = per_query ? static_cast<int>(min(p.sequences.max_seqlen_q - first_query, MaskTiles::kSize)) : 1;
  const int columns = per_key ? static_cast<int>(min(p.sequences.max_seqlen_k - first_key, MaskTiles::kSize)) : 1;
  const uint8_t* first = static_cast<const uint8_t*>(mask.data) + mask.offset({batch, head, first_query, first_key});
  if (selects_keys && first_query >= p.sequence_of(batch).num_queries) return;
  const bool vectors = !selects_keys && mask.key_stride == 1 && columns == MaskTiles::kSize &&
                       mask.query_stride % kVectorBytes == 0 && reinterpret_cast<uintptr_t>(first) % kVectorBytes == 0;
  uint8_t flags = 0;
  if (vectors) {
    flags = look_at_vectors(first, mask.query_stride, rows);
  } else if (selects_keys) {
    flags = look_at_both(p, {batch, head, first_query, first_key}, lane);
  } else {
    for (int row = 0; row < rows; ++row) {
      for (int column = lane; column < columns; column += kWarpSize) {
        const bool attend = first[row * mask.query_stride + column * mask.key_stride] != 0;
        flags |= attend ? MaskTiles::kSomeTrue : MaskTiles::kSomeFalse;
      }
    }
  }
  flags = static_cast<uint8_t>(__reduce_or_sync(0xFFFFFFFFu, flags));
  const attention::MaskTiles& tiles = p.score_mod.mask_tiles;
  if (lane == 0) {
    tiles.row(batch, head, first_query / MaskTiles::kSize)[first_key / MaskTiles::kSize * tiles.key_stride] = flags;
  }
}

}  // namespace

cudaError_t scan_mask_tiles(attention::AttentionParams& params, uint8_t* memory, cudaStream_t stream) {
  if (memory == nullptr) return cudaSuccess;
  params.score_mod.mask_tiles = plan::mask_tiles_in(memory, params);
  if (!params.score_mod.mask.present()) {
    return params.score_mod.blocks.present() ? make_block_tiles(params, stream) : scan_interval_tiles(params, stream);
  }
  const MaskTileCounts counts = plan::count_mask_tiles(params);
  const int64_t blocks = attention::ceil_div(counts.total(), kWarpsPerBlock);
  return launch_early(mask_tiles_kernel, {.blocks = blocks, .threads = kWarpsPerBlock * kWarpSize}, stream, params,
                      counts);
}

}  // namespace flash_attn_ext::common
