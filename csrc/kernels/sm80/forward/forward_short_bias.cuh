// Forward pass of short heads with a bias for each query and key, and a mask that may hide keys, the same ones from all
// queries (Dao 2023, "FlashAttention-2", algorithm 1).
//
// Grid: one CTA per (batch, head), which has all queries and keys. Each warp owns 32 queries, and loops over tiles of
// 32 keys without barriers. Tiles whose keys are all hidden are skipped. Shared memory: Q, K, V, and three stages of
// each warp's own tile of the bias, which only this warp reads. Two CTAs per SM hide each other's prologue and
// epilogue.
#pragma once

#include "kernels/common/launch/launch_early.cuh"
#include "kernels/common/repair/repair.h"
#include "kernels/config/short_bias.h"
#include "kernels/score/key_mask_words.cuh"
#include "kernels/sm80/forward/forward_rows.cuh"
#include "kernels/sm80/launch.cuh"
#include "kernels/sm80/nan_flags.cuh"
#include "kernels/sm80/sm80_kernels.h"
#include "ptx/dependent_launch.h"
#include "tile/sm80/copy_rows.h"
#include "tile/sm80/gemm.h"

namespace flash_attn_ext::sm80 {

template <class ElementType>
struct ForwardShortBiasKernel {
  using Element = ElementType;
  using WarpRows = ForwardRows<KernelTraits<Element, kShortBiasForward>>;
  static constexpr TileShape kTile = kShortBiasForward.tile;
  static constexpr int kThreads = kTile.warps * kWarpSize;
  static constexpr int kRowsPerWarp = WarpRows::kRowsPerWarp;
  static constexpr int kKeyTiles = kShortBiasTokens / kTile.keys;
  static_assert(kTile.keys == 32 && kKeyTiles == kTile.warps);  // each warp reads the mask of a key tile

  using Tile = tile::SharedTile<Element, kShortBiasTokens, kShortBiasHeadDim>;
  using BiasTile = tile::SharedTile<Element, kRowsPerWarp, kTile.keys>;
  using Scores = tile::Accumulator<kRowsPerWarp / 16, kTile.keys / 8>;

  struct Shared {
    Tile q;
    Tile k;
    Tile v;
    BiasTile bias[kTile.warps][kTile.stages];
    uint32_t unmasked[kKeyTiles];  // the bits of the mask's keys
  };

  const ForwardParams& p;
  Shared& shared;
  const int batch;
  const int head;

  __device__ __forceinline__ void run() {
    const int key_head = head / static_cast<int>(p.queries_per_key_head());
    copy(shared.q, p.q, head, p.head_dim_qk, num_queries());
    copy(shared.k, p.k, key_head, p.head_dim_qk, num_keys());
    copy(shared.v, p.v, key_head, p.head_dim_v, num_keys());
    ptx::commit_copies();
    const uint32_t own = __ballot_sync(0xFFFFFFFFu, lane_key_is_unmasked(p, coord(), tile::warp() * kTile.keys));
    if (tile::lane() == 0) shared.unmasked[tile::warp()] = own;
    __syncthreads();
    WarpRows rows = {p};
    rows.clear();
    const uint32_t tiles =
        __ballot_sync(0xFFFFFFFFu, tile::lane() < kKeyTiles && shared.unmasked[tile::lane() % kKeyTiles] != 0);
    iterate(rows, warp_row() < num_queries() ? tiles : 0);
    rows.finish(coord(), 0, 0, shared.q);  // only this warp has read its rows of Q
    // Its key head is there already; coord() would divide again.
    const HeadCoord work = {{batch, 0, 0, num_queries(), num_keys()}, head, key_head};
    flag_nan_in_order_of_heads<kTile.warps>(p.nan_flags, p, work, rows.out.has_nan());
  }

 private:
  __device__ __forceinline__ int num_keys() const { return static_cast<int>(p.sequences.max_seqlen_k); }
  __device__ __forceinline__ int num_queries() const { return static_cast<int>(p.sequences.max_seqlen_q); }
  __device__ __forceinline__ static int warp_row() { return tile::warp() * kRowsPerWarp; }
  __device__ __forceinline__ HeadCoord coord() const {
    return {{batch, 0, 0, num_queries(), num_keys()}, head, head / p.queries_per_key_head()};
  }

  __device__ __forceinline__ void copy(Tile& tile, const attention::MatrixView& view, int from_head, int64_t columns,
                                       int rows) const {
    const auto* source = view.row<const Element>(batch, from_head, 0);
    tile::copy_sequence_async<kThreads>(tile, {source, view.row_stride, static_cast<int>(columns)}, rows);
  }

  // Issues the copies of the warp's bias for a key tile, zero-padded, and commits them. Without a tile the group is
  // empty, so that waiting always has the same meaning.
  __device__ __forceinline__ void load_bias(int stage, int key_tile) {
    constexpr int kChunks = kTile.keys / BiasTile::kChunk;
    constexpr int kRowStep = kWarpSize / kChunks;
    static_assert(kRowStep % 8 == 0);  // the swizzle repeats
    if (key_tile >= 0) {
      const attention::BroadcastView& bias = p.score_mod.bias;
      const int row = tile::lane() / kChunks;
      const int column = tile::lane() % kChunks * BiasTile::kChunk;
      const int key = key_tile * kTile.keys + column;
      const int bytes = min(max(num_keys() - key, 0), BiasTile::kChunk) * static_cast<int>(sizeof(Element));
      const auto* source =
          static_cast<const Element*>(bias.data) + bias.offset({batch, head, warp_row() + row, 0}) + key;
      const uint32_t target = shared.bias[tile::warp()][stage].address(row, column);
#pragma unroll
      for (int step = 0; step < kRowsPerWarp; step += kRowStep) {
        const bool exists = warp_row() + row + step < num_queries();
        ptx::copy_async_16(target + step * BiasTile::kRowBytes, source + step * bias.query_stride, exists ? bytes : 0);
      }
    }
    ptx::commit_copies();
  }

  // Removes the first key tile from those that are left. -1: there is none.
  __device__ __forceinline__ static int take(uint32_t& tiles_left) {
    const int first = __ffs(static_cast<int>(tiles_left)) - 1;
    tiles_left &= tiles_left - 1;
    return first;
  }

  __device__ __forceinline__ void iterate(WarpRows& rows, uint32_t tiles) {
    uint32_t ahead = tiles;
#pragma unroll
    for (int stage = 0; stage < kTile.stages - 1; ++stage) load_bias(stage, take(ahead));
    ptx::wait_copies<kTile.stages - 1>();
    __syncthreads();  // Q, K and V have arrived
    int stage = 0;
    while (tiles != 0) {
      const int key_tile = take(tiles);
      ptx::wait_copies<kTile.stages - 2>();
      __syncwarp();  // the warp's bias has arrived, and no lane reads the preceding one any more
      load_bias(stage == 0 ? kTile.stages - 1 : stage - 1, take(ahead));
      Scores scores;
      scores.clear();
      tile::multiply_head_dims(scores, shared.q, warp_row(), keys_of(shared.k, key_tile));
      add_bias(scores, shared.bias[tile::warp()][stage]);
      const uint32_t word = shared.unmasked[key_tile];
      if (word != 0xFFFFFFFFu) hide(scores, own_columns(word));
      rows.softmax(scores);
      tile::multiply_registers(rows.out, scores, keys_of(shared.v, key_tile));
      stage = stage == kTile.stages - 1 ? 0 : stage + 1;
    }
  }

  __device__ __forceinline__ static const auto& keys_of(const Tile& tile, int key_tile) {
    return tile.template rows_from<kTile.keys>(key_tile * kTile.keys);
  }

  // A NaN in a key that a bias of -inf hides makes its row NaN, which is then computed again without tensor cores.
  __device__ __forceinline__ void add_bias(Scores& scores, const BiasTile& tile) const {
    const auto scale = static_cast<float>(p.score_mod.scale);
    const tile::LeftOperand<BiasTile> bias(tile, 0);
#pragma unroll
    for (int i = 0; i < Scores::kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < Scores::kColumnTiles; j += 2) {
        uint32_t words[4];  // of the two rows in column tile j, then in the next one
        bias.load(words, 16 * i, 8 * j);
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          const int r = 2 * i + word % 2;
          const float2 added = ptx::unpack(words[word], Element{});
          scores.at(r, j + word / 2, 0) = fmaf(scores.at(r, j + word / 2, 0), scale, added.x);
          scores.at(r, j + word / 2, 1) = fmaf(scores.at(r, j + word / 2, 1), scale, added.y);
        }
      }
    }
  }

  __device__ __forceinline__ static void hide(Scores& scores, uint32_t own) {
#pragma unroll
    for (int j = 0; j < Scores::kColumnTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const bool attends = column_is_unmasked(own, j, e);
#pragma unroll
        for (int r = 0; r < Scores::kThreadRows; ++r) scores.at(r, j, e) = attends ? scores.at(r, j, e) : -INFINITY;
      }
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kTile.ctas_per_sm)
    forward_short_bias_kernel(const __grid_constant__ ForwardParams p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  ptx::wait_for_kernel_before();
  ptx::allow_dependent_launch();
  const auto heads = static_cast<unsigned>(p.num_heads_q);
  Kernel{p, *reinterpret_cast<typename Kernel::Shared*>(shared_memory), static_cast<int>(blockIdx.x / heads),
         static_cast<int>(blockIdx.x % heads)}
      .run();
}

template <class Element>
cudaError_t forward_short_bias(const ForwardParams& p, cudaStream_t stream) {
  using Kernel = ForwardShortBiasKernel<Element>;
  static_assert(sizeof(typename Kernel::Shared) <= kShortBiasSharedBytes);
  const cudaError_t error =
      common::launch_blocks_early<Kernel>(forward_short_bias_kernel<Kernel>, p.batch * p.num_heads_q, stream, p);
  if (error != cudaSuccess) return error;
  const common::FlaggedRows rows =
      common::rows_in_order_of_heads(p, p.nan_flags, Rows::kQueries, kShortBiasTokens, Kernel::kRowsPerWarp);
  return common::repair_forward<Element>(p, rows, stream);
}

}  // namespace flash_attn_ext::sm80
