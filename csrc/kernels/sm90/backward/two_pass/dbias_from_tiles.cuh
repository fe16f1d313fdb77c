// dBias of a bias that has a value for each query and key: materialised tiles of dS, summed over the heads and batch
// entries that share the bias.
//
// Grid: one CTA for each (batch entry and head of the bias, 64 queries x 64 keys). Its threads read the tile of each of
// the launch's heads in its memory layout, and add the tiles up in a fixed order. Shared memory rearranges the sums to
// the layout of the bias. Where a launch has all heads and batch entries that an element of dBias sums, the sums are
// written, else they are added to those of earlier launches. Bound: memory. dS is read once, and dBias is written once,
// or read and written once for each launch.
#pragma once

#include "kernels/common/launch/launch_blocks.cuh"
#include "kernels/epilogue/store_dbias.cuh"
#include "kernels/schedule/bias_tiles.cuh"
#include "kernels/sm90/backward/two_pass/traits.h"
#include "kernels/sm90/bias_mask.cuh"

namespace flash_attn_ext::sm90 {

struct DbiasArguments {
  attention::BackwardParams params;
  BiasTiles bias_tiles;
  MaterialisedTiles tiles;
  const void* dscores;  // tiles of dS
};

template <class Element>
struct DbiasFromTilesKernel {
  using Store = DbiasTileStore<Element>;
  static_assert(BiasTiles::kTile == MaterialisedTiles::kRows);
  static constexpr int kThreads = Store::kThreads;
  static constexpr int kBlocks = 5;  // CTAs per SM
  static constexpr int kChunk = 8;   // elements in 16 bytes
  static constexpr int kRowChunks = MaterialisedTiles::kRows / kChunk;
  static constexpr int kRowStep = kThreads / kRowChunks;
  static constexpr int kRowsPerThread = MaterialisedTiles::kRows / kRowStep;
  using Sums = DbiasTileSums<Element>;
  using Chunks = typename Sums::Chunks;

  struct Shared {
    typename Store::Sums sums;
  };

  const DbiasArguments& args;
  Shared& shared;
  int query_tile;
  int key_tile;
  Sums sums;

  // batch and head are those of the bias, and 0 where it is broadcast.
  __device__ __forceinline__ void run(uint32_t batch, uint32_t head) {
    const attention::BackwardParams& p = args.params;
    // Another launch has the queries, or the heads that share the matrix. Both conditions are uniform over the CTA.
    if (query_tile < args.tiles.begin_of(0) || query_tile >= args.tiles.end_of(0)) return;
    SharingHeads heads(args.bias_tiles, p.dbias, batch, head);
    if (heads.left == 0) return;
    sums.sum(heads, [&](Chunks& chunks16) { load(chunks16, heads.next(args.bias_tiles, p)); });
    rearrange();
    Store{p, int64_t{query_tile} * MaterialisedTiles::kRows, int64_t{key_tile} * MaterialisedTiles::kRows,
          args.bias_tiles.in_chunks}
        .store(batch * p.dbias.batch_stride + head * p.dbias.head_stride, shared.sums);
  }

 private:
  // A thread's chunks are at the same position of rows that are kRowStep apart. These rows have the same swizzle.
  __device__ __forceinline__ static int thread_row() { return static_cast<int>(threadIdx.x) / kRowChunks; }
  __device__ __forceinline__ static int thread_place() { return static_cast<int>(threadIdx.x) % kRowChunks; }

  // The 16-byte chunks of a tile that was not stored stay zeros, and so do those of queries that the sequence does not
  // have. Past its last query, a row of a packed sequence's tile belongs to another sequence, and may see keys that no
  // query attends.
  __device__ __forceinline__ void load(Chunks& chunks16, const HeadCoord& coord) const {
    const attention::BackwardParams& p = args.params;
    const TileRange keys = SeenTiles::of(p.visibility, coord.sequence, args.tiles).keys_of(query_tile);
    if (key_tile < keys.begin || key_tile >= keys.end) return;
    const auto batch = static_cast<int>(coord.sequence.batch);
    const auto head = static_cast<int>(coord.head);
    const auto mask = MaskTileRow::of(p.score_mod.mask_tiles, batch, head, query_tile);
    if ((mask.flags(key_tile) & attention::MaskTiles::kSomeTrue) == 0) return;
    const auto key_head = static_cast<int>(coord.key_head);
    const int head_of_group = head - key_head * static_cast<int>(p.queries_per_key_head());
    const int first = args.tiles.first_of_head(p, coord.sequence, key_head, head_of_group) +
                      args.tiles.before(MaterialisedTiles::first_row(p, coord.sequence) + query_tile);
    const auto* tile = reinterpret_cast<const uint4*>(static_cast<const Element*>(args.dscores) +
                                                      MaterialisedTiles::offset(first + key_tile - keys.begin));
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int query = query_tile * MaterialisedTiles::kRows + thread_row() + i * kRowStep;
      if (query < coord.sequence.num_queries) chunks16[i] = __ldcs(tile + threadIdx.x + i * kThreads);
    }
  }

  // Writes the sums to shared memory as queries x keys. MaterialisedTiles defines the order in which a stored row holds
  // its keys.
  __device__ __forceinline__ void rearrange() {
    constexpr int kHalfRowChunks = kRowChunks / 2;
    const int chunk16 = thread_place() ^ thread_row() % 8;
    const int first = chunk16 / kHalfRowChunks * (MaterialisedTiles::kRows / 2) + chunk16 % kHalfRowChunks * 2;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
#pragma unroll
      for (int e = 0; e < kChunk; e += 2) {
        *reinterpret_cast<float2*>(&shared.sums[thread_row() + i * kRowStep][first + e / 2 * 8]) =
            make_float2(sums.at[i][e], sums.at[i][e + 1]);
      }
    }
    __syncthreads();
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocks)
    dbias_from_tiles_kernel(const __grid_constant__ DbiasArguments args) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const BiasTiles::Place at = args.bias_tiles.place(blockIdx.x);
  Kernel kernel = {.args = args,
                   .shared = *reinterpret_cast<typename Kernel::Shared*>(shared_memory),
                   .query_tile = static_cast<int>(at.row),
                   .key_tile = static_cast<int>(at.column)};
  kernel.run(at.batch, at.head);
}

// Adds what a launch's pairs contribute to dBias.
template <class Element>
cudaError_t dbias_from_tiles(const TwoPassArguments& args, const Pairs& pairs, cudaStream_t stream) {
  using Kernel = DbiasFromTilesKernel<Element>;
  const DbiasArguments arguments = {.params = args.params,
                                    .bias_tiles = make_bias_tiles(args.params, pairs, /*rows_are_keys=*/false),
                                    .tiles = args.tiles,
                                    .dscores = static_cast<const Element*>(args.workspace.scores) + args.tiles.between};
  return common::launch_blocks<Kernel>(dbias_from_tiles_kernel<Kernel>, int64_t{arguments.bias_tiles.num_blocks},
                                       stream, arguments);
}

}  // namespace flash_attn_ext::sm90
