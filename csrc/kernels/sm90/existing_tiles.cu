// One kernel counts the work tiles that exist in each chunk of the schedule. The next one adds up the numbers of the
// chunks before its own, and lists its own.
#include "kernels/common/launch/launch_early.cuh"
#include "kernels/schedule/block.cuh"
#include "kernels/sm90/existing_tiles.h"
#include "ptx/dependent_launch.h"

namespace flash_attn_ext::sm90 {
namespace {

constexpr int kThreads = ExistingTiles::kChunk;
constexpr int kWarps = kThreads / 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

struct QueryTileExists {
  attention::SequenceTable sequences;
  Schedule schedule;
  int tile_rows;

  __device__ __forceinline__ bool operator()(uint32_t block) const {
    const Place at = schedule.place(block);
    return first_query_of(schedule, at, tile_rows) < sequences.at(at.batch).num_queries;
  }
};

struct KeyTileExists {
  attention::SequenceTable sequences;
  LoopOrder order;
  uint32_t pairs_of_entry;

  __device__ __forceinline__ bool operator()(uint32_t index) const {
    const LoopOrder::WorkTile at = order.work_tile(index);
    const attention::Sequence sequence = sequences.at(at.pair / pairs_of_entry);
    return at.tile < LoopOrder::num_tiles(sequence.num_keys, LoopOrder::kKeys);
  }
};

template <class Exists>
struct ListArguments {
  Exists exists;
  uint32_t all;
  uint32_t entries;
  uint32_t* count;
  uint32_t* counts;  // of each chunk
  int* list;

  __device__ __forceinline__ uint32_t index() const { return blockIdx.x * kThreads + threadIdx.x; }
  __device__ __forceinline__ bool has_tile() const { return index() < all && exists(index()); }
};

template <class Exists>
__global__ void __launch_bounds__(kThreads) count_tiles_kernel(const __grid_constant__ ListArguments<Exists> args) {
  ptx::wait_for_kernel_before();
  ptx::allow_dependent_launch();
  const int count = __syncthreads_count(args.has_tile());
  if (threadIdx.x == 0) args.counts[blockIdx.x] = static_cast<uint32_t>(count);
}

// Offsets that are no prefix sums may have more work tiles than the list has entries. CTAs of the backward pass might
// wait for those that are left out. So the list has none then, and nothing of the call is computed.
template <class Exists>
__global__ void __launch_bounds__(kThreads) list_tiles_kernel(const __grid_constant__ ListArguments<Exists> args) {
  __shared__ uint32_t before_of_warps[kWarps];  // what each warp found in the chunks before this one
  __shared__ uint32_t total_of_warps[kWarps];   // what it found in all chunks
  __shared__ uint32_t own_of_warps[kWarps];
  ptx::wait_for_kernel_before();
  ptx::allow_dependent_launch();
  const uint32_t warp = threadIdx.x / 32;
  const uint32_t lane = threadIdx.x % 32;
  uint32_t before = 0;
  uint32_t total = 0;
  for (uint32_t chunk = threadIdx.x; chunk < gridDim.x; chunk += kThreads) {
    const uint32_t count = args.counts[chunk];
    before += chunk < blockIdx.x ? count : 0;
    total += count;
  }
  before = __reduce_add_sync(kAllLanes, before);
  total = __reduce_add_sync(kAllLanes, total);
  const bool has_tile = args.has_tile();
  const unsigned own = __ballot_sync(kAllLanes, has_tile);
  if (lane == 0) {
    before_of_warps[warp] = before;
    total_of_warps[warp] = total;
    own_of_warps[warp] = static_cast<uint32_t>(__popc(own));
  }
  __syncthreads();
  auto position = static_cast<uint32_t>(__popc(own & ((1u << lane) - 1)));
  uint32_t end = 0;
  for (uint32_t w = 0; w < kWarps; ++w) {
    position += before_of_warps[w] + (w < warp ? own_of_warps[w] : 0);
    end += total_of_warps[w];
  }
  if (end > args.entries) end = 0;
  if (has_tile && position < end) args.list[position] = static_cast<int>(args.index());
  if (blockIdx.x > 0) return;
  if (threadIdx.x == 0) *args.count = end;
  for (uint32_t i = end + threadIdx.x; i < args.entries; i += kThreads) args.list[i] = ExistingTiles::kNone;
}

template <class Exists>
cudaError_t list_tiles(ExistingTiles& tiles, const Exists& exists, uint32_t all, void* memory, cudaStream_t stream) {
  const int64_t chunks = ExistingTiles::chunks(all);
  auto* const count = static_cast<uint32_t*>(memory);
  auto* const counts = count + 1;
  auto* const list = reinterpret_cast<int*>(counts + chunks);
  const ListArguments<Exists> args = {exists, all, tiles.entries, count, counts, list};
  const common::EarlyLaunch launch = {.blocks = chunks, .threads = kThreads};
  const cudaError_t error = common::launch_early(count_tiles_kernel<Exists>, launch, stream, args);
  if (error != cudaSuccess) return error;
  tiles.count = count;
  tiles.list = list;
  return common::launch_early(list_tiles_kernel<Exists>, launch, stream, args);
}

}  // namespace

cudaError_t list_existing_query_tiles(ExistingTiles& tiles, const attention::SequenceTable& sequences,
                                      const Schedule& schedule, int tile_rows, void* memory, cudaStream_t stream) {
  return list_tiles(tiles, QueryTileExists{sequences, schedule, tile_rows}, schedule.num_blocks, memory, stream);
}

cudaError_t list_existing_key_tiles(ExistingTiles& tiles, const attention::SequenceTable& sequences,
                                    const LoopOrder& order, int64_t num_heads_k, void* memory, cudaStream_t stream) {
  const auto pairs_of_entry = static_cast<uint32_t>(num_heads_k) * order.kv_group_shares;
  return list_tiles(tiles, KeyTileExists{sequences, order, pairs_of_entry}, order.num_work_tiles(), memory, stream);
}

}  // namespace flash_attn_ext::sm90
