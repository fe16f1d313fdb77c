// dBias of a bias with its own value for each query and key: stored tiles of dS, summed over the heads and batch
// entries that share the bias.
//
// Grid: one block per (batch entry and head of the bias, 64 queries x 64 keys). Its threads read the tile of each of
// the launch's heads as it lies in memory, and add them up in order. The sums turn to the bias's own layout in shared
// memory, and are written as they are where a launch holds all that they sum, else added to what earlier launches left.
// Bound: memory. dS is read once, and dBias written once, or read and written once per launch.
#pragma once

#include "kernels/common/launch_blocks.cuh"
#include "kernels/epilogue/store_dbias.cuh"
#include "kernels/schedule/bias_tiles.cuh"
#include "kernels/sm90/backward_storing/attended_keys.cuh"

namespace flash_attn_ext::sm90 {

struct DbiasArguments {
  attention::BackwardParams params;
  BiasTiles bias_tiles;
  ScoreTiles tiles;
  const void* dscores;  // tiles of dS
};

template <class Element>
struct DbiasFromTilesKernel {
  using Store = DbiasTileStore<Element>;
  static_assert(BiasTiles::kTile == ScoreTiles::kRows);
  static constexpr int kThreads = Store::kThreads;
  static constexpr int kBlocks = 5;  // a multiprocessor
  static constexpr int kPiece = 8;   // elements in 16 bytes
  static constexpr int kRowPieces = ScoreTiles::kRows / kPiece;
  static constexpr int kRowStep = kThreads / kRowPieces;
  static constexpr int kRowsPerThread = ScoreTiles::kRows / kRowStep;
  static constexpr int kHeadsInFlight = 2;

  struct Shared {
    typename Store::Sums sums;
  };

  const DbiasArguments& args;
  Shared& shared;
  int query_tile;
  int key_tile;
  float sums[kRowsPerThread][kPiece];

  // batch and head: of the bias, 0 where it is broadcast.
  __device__ __forceinline__ void run(uint32_t batch, uint32_t head) {
    const attention::BackwardParams& p = args.params;
    if (query_tile < args.tiles.begin_of(0) || query_tile >= args.tiles.end_of(0)) return;  // another launch's
    SharingHeads heads(args.bias_tiles, p.dbias, batch, head);
    if (heads.left == 0) return;  // the same for all threads: the matrix is another launch's
    for (auto& row : sums) {
      for (float& sum : row) sum = 0.0f;
    }
    while (heads.left > 0) {
      uint4 pieces[kHeadsInFlight][kRowsPerThread] = {};
#pragma unroll
      for (auto& of_head : pieces) {
        if (heads.left > 0) load(of_head, heads.next(args.bias_tiles, p));
      }
#pragma unroll
      for (const auto& of_head : pieces) add(of_head);
    }
    turn();
    Store{p, int64_t{query_tile} * ScoreTiles::kRows, int64_t{key_tile} * ScoreTiles::kRows, args.bias_tiles.in_chunks}
        .store(batch * p.dbias.batch_stride + head * p.dbias.head_stride, shared.sums);
  }

 private:
  // The thread's pieces have one place in rows kRowStep apart, whose swizzle is the same.
  __device__ __forceinline__ static int thread_row() { return static_cast<int>(threadIdx.x) / kRowPieces; }
  __device__ __forceinline__ static int thread_place() { return static_cast<int>(threadIdx.x) % kRowPieces; }

  // Those of a tile that was not stored stay zeros, and those of queries that the sequence does not have: past its last
  // query a row of a packed sequence's tile is another sequence's, and may see keys that nobody attends.
  __device__ __forceinline__ void load(uint4 (&pieces)[kRowsPerThread], const WorkItem& item) const {
    const attention::BackwardParams& p = args.params;
    const TileRange keys = SeenTiles::of(p.visibility, item.sequence).keys_of(query_tile);
    if (key_tile < keys.begin || key_tile >= keys.end) return;
    const auto batch = static_cast<int>(item.sequence.batch);
    const auto head = static_cast<int>(item.head);
    const auto mask = MaskTileRow::of(p.score_mod.mask_tiles, batch, head, query_tile);
    if ((mask.flags(key_tile) & attention::MaskTiles::kSomeTrue) == 0) return;
    const auto key_head = static_cast<int>(item.key_head);
    const int member = head - key_head * static_cast<int>(p.queries_per_key_head());
    const int first = args.tiles.first_of_head(p, item.sequence, key_head, member) +
                      args.tiles.before(ScoreTiles::first_row(p, item.sequence) + query_tile);
    const auto* tile = reinterpret_cast<const uint4*>(static_cast<const Element*>(args.dscores) +
                                                      ScoreTiles::offset(first + key_tile - keys.begin));
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int query = query_tile * ScoreTiles::kRows + thread_row() + i * kRowStep;
      if (query < item.sequence.num_queries) pieces[i] = __ldcs(tile + threadIdx.x + i * kThreads);
    }
  }

  __device__ __forceinline__ void add(const uint4 (&pieces)[kRowsPerThread]) {
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const uint32_t words[] = {pieces[i].x, pieces[i].y, pieces[i].z, pieces[i].w};
#pragma unroll
      for (int e = 0; e < kPiece; ++e) {
        sums[i][e] += ptx::to_float(static_cast<uint16_t>(words[e / 2] >> (e % 2 * 16)), Element{});
      }
    }
  }

  // The sums, to queries x keys: in which order a row's keys are stored, ScoreTiles says.
  __device__ __forceinline__ void turn() {
    constexpr int kHalfPieces = kRowPieces / 2;
    const int piece = thread_place() ^ thread_row() % 8;
    const int first = piece / kHalfPieces * (ScoreTiles::kRows / 2) + piece % kHalfPieces * 2;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
#pragma unroll
      for (int e = 0; e < kPiece; e += 2) {
        *reinterpret_cast<float2*>(&shared.sums[thread_row() + i * kRowStep][first + e / 2 * 8]) =
            make_float2(sums[i][e], sums[i][e + 1]);
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

// What a launch's pairs give to dBias.
template <class Element>
cudaError_t dbias_from_tiles(const StoringArguments& args, const Pairs& pairs, cudaStream_t stream) {
  using Kernel = DbiasFromTilesKernel<Element>;
  const DbiasArguments arguments = {.params = args.params,
                                    .bias_tiles = make_bias_tiles(args.params, pairs, /*rows_are_keys=*/false),
                                    .tiles = args.tiles,
                                    .dscores = static_cast<const Element*>(args.workspace.scores) + args.tiles.between};
  return common::launch_blocks<Kernel>(dbias_from_tiles_kernel<Kernel>, int64_t{arguments.bias_tiles.num_blocks},
                                       stream, arguments);
}

}  // namespace flash_attn_ext::sm90
