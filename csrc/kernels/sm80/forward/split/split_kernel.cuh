// Split-KV forward pass, for few queries that see many keys: O = softmax(score(Q K^T)) V (Dao et al. 2023,
// "Flash-Decoding").
//
// Grid: persistent CTAs, each with a stream-K range of the key tiles of all work tiles (schedule/stream_k.cuh). The
// rows of a work tile are the queries of all heads of a KV group (schedule/row_tiles.cuh), so K and V are read once. A
// warp owns some rows and a part of each tile's keys, with its own O, m and l. At the end of a work tile the CTA merges
// those of its warps. If it had all keys of the work tile, it writes O. Otherwise it stores the partial O of its split
// in the workspace, for the combine kernel (common/sums/combine.h).
// New keys of a cache are read from k_new and v_new, and rotated in this kernel. Extra CTAs at the end of the grid
// write them to the cache, which only the next kernel reads.
// Shared memory: Q, and `stages` tiles of K and V. At the end of a work tile, the warps' O takes their place.
#pragma once

#include "kernels/common/rows/merged_row.cuh"
#include "kernels/config/split.h"
#include "kernels/schedule/stream_k.cuh"
#include "kernels/score/softmax.cuh"
#include "kernels/sm80/forward/split/packed_rows.cuh"
#include "kernels/sm80/forward/split/split_copies.cuh"
#include "ptx/dependent_launch.h"
#include "tile/sm80/copy_rows.h"
#include "tile/sm80/gemm.h"

namespace flash_attn_ext::sm80 {

// Calls that append to a cache have kernels of their own: in the others, appending would cost registers, and
// instructions in each iteration (docs/kernels/log/split.md, "New keys by the kernel that attends").
template <class ElementType, SplitConfig kConfig, bool kAppendsValue>
struct SplitKernel {
  using Element = ElementType;
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr bool kGeneric = kConfig.score == ScoreMode::kGeneric;
  static constexpr bool kAppends = kAppendsValue;
  static constexpr SplitTile kTile = kConfig.tile;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kWarps = kThreads / kWarpSize;
  static constexpr int kWarpRows = kTile.rows_per_warp();
  static constexpr int kWarpKeys = kTile.keys_per_warp();
  static constexpr int kColumns = kTile.columns;

  using QTile = tile::SharedTile<Element, kTile.rows, kHeadDim>;
  using KTile = tile::SharedTile<Element, kTile.keys, kHeadDim>;
  using VTile = tile::SharedTile<Element, kTile.keys, kColumns>;
  using Place = tile::CopyPlace<kThreads, KTile>;
  using Scores = tile::Accumulator<kWarpRows / 16, kWarpKeys / 8>;
  using Output = tile::Accumulator<kWarpRows / 16, kColumns / 8>;
  using Rows = PackedRows<Element, Scores>;
  using BiasMask = typename Rows::BiasMask;
  using Merged = common::MergedRow<kColumns>;

  struct Tiles {
    QTile q;
    KTile k[kTile.stages];
    VTile v[kTile.stages];
  };
  // Rows are padded by 8 floats, so that consecutive rows begin in different banks of shared memory.
  struct WarpResults {
    float out[kTile.key_warps][kTile.rows][kColumns + 8];
    float2 state[kTile.key_warps][kTile.rows];
  };
  union Shared {
    Tiles tiles;
    WarpResults results;
  };

  const SplitParams& p;
  Shared& shared;
  const StreamKRange<kTile.keys>& range;
  RowTiles::WorkTile work_tile;
  Output out;
  OnlineSoftmax<Output::kThreadRows> running;

  __device__ __forceinline__ static int row_warp() { return tile::warp() % kTile.row_warps; }
  __device__ __forceinline__ static int key_warp() { return tile::warp() / kTile.row_warps; }
  __device__ __forceinline__ int num_rows() const { return range.keys.num_rows; }
  __device__ __forceinline__ PackedRow packed_row(int row) const {
    return p.stream_k.tiles.at(range.keys.first_row + row, work_tile.head);
  }
  __device__ __forceinline__ int first_column() const { return static_cast<int>(work_tile.slice) * kColumns; }

  // Scores that are only scaled are scaled in the exponent.
  __device__ __forceinline__ bool folds_scale() const { return !kGeneric || p.score_mod.only_scales(); }

  // The mainloop over tiles [begin, end) of the work tile's keys.
  __device__ __forceinline__ void attend(int begin, int end) {
    out.clear();
    running.clear();
    if (begin == end) return;
    int stage = 0;
#pragma unroll 1
    for (int tile = begin - kTile.stages; tile < end; ++tile) {
      if (tile >= begin) {
        BiasMask bias_mask;
        if constexpr (kFetchesEarly) rows_of_warp().fetch(bias_mask, first_key_of_warp(tile));
        ptx::wait_copies<kTile.stages - 1>();
        __syncthreads();  // the tile has arrived
        step(stage, tile, bias_mask);
        __syncthreads();  // no warp reads the tile any more
      }
      if (tile + kTile.stages < end) copies().load(stage, tile + kTile.stages);
      if (tile == begin - kTile.stages)
        copies().load_queries();  // keys first, since memory takes longer to deliver them
      ptx::commit_copies();       // also an empty group, so that groups can be counted
      stage = stage + 1 == kTile.stages ? 0 : stage + 1;
    }
  }

  // Merges the warps' O of the CTA's rows. Writes the rows of a whole work tile, or stores those of a split in a slot.
  // Returns whether the thread's rows of a whole work tile have a NaN.
  __device__ __forceinline__ bool finish(bool whole, int slot) {
    store_results();
    __syncthreads();
    bool has_nan = false;
    if (whole) {
#pragma unroll 1
      for (int row = tile::warp(); row < num_rows(); row += kWarps) {
        const attention::Sequence& sequence = range.keys.sequence;
        const PackedRow at = packed_row(row);
        const common::RowPlace place = {sequence.batch, at.head, sequence.query_begin + at.query};
        Merged merged = merge(row);
        has_nan |= common::finish_row<Element>(p, place, merged, first_column());
      }
    } else {
      constexpr int kAtOnce = kTile.rows == 16 ? 1 : 2;
#pragma unroll kAtOnce
      for (int row = tile::warp(); row < num_rows(); row += kWarps) merge(row).store(p.splits, slot, row);
    }
    __syncthreads();  // the next work tile's loads overwrite the results
    return has_nan;
  }

 private:
  // Merges the warps' results for a row.
  __device__ __forceinline__ Merged merge(int row) const {
    Merged merged;
#pragma unroll
    for (int key_warp = 0; key_warp < kTile.key_warps; ++key_warp) {
      merged.add(shared.results.state[key_warp][row], shared.results.out[key_warp][row]);
    }
    return merged;
  }

  __device__ __forceinline__ SplitCopies<SplitKernel> copies() const {
    return {p, shared.tiles, range.keys, work_tile};
  }

  // Whether the bias and mask are fetched before the keys have arrived, where registers are left.
  static constexpr bool kFetchesEarly = kGeneric && kTile.rows == 16;

  // Computed again for each tile that needs them, so that no register holds them.
  __device__ __forceinline__ Rows rows_of_warp() const {
    Rows rows(p, range.keys.sequence);
#pragma unroll
    for (int r = 0; r < Rows::kThreadRows; ++r) {
      const int row = row_warp() * kWarpRows + Scores::row(r);
      rows.set(r, packed_row(row), row < num_rows());
    }
    return rows;
  }

  __device__ __forceinline__ static int first_key_of_warp(int tile) {
    return tile * kTile.keys + key_warp() * kWarpKeys;
  }

  __device__ __forceinline__ void step(int stage, int tile, BiasMask& bias_mask) {
    const int row_in_tile = key_warp() * kWarpKeys;
    const int first_key = first_key_of_warp(tile);
    Scores scores;
    scores.clear();
    tile::multiply_head_dims(scores, shared.tiles.q, row_warp() * kWarpRows,
                             shared.tiles.k[stage].template rows_from<kWarpKeys>(row_in_tile));
    const bool folded = folds_scale();
    const bool full = range.keys.tiles.full(tile);
    if (kGeneric || !full) {
      const Rows rows = rows_of_warp();
      if constexpr (kGeneric && !kFetchesEarly) rows.fetch(bias_mask, first_key);
      if constexpr (kGeneric) rows.modify(scores, bias_mask, first_key, folded);
      if (!full) rows.hide_invisible(scores, first_key);
    }
    running.template update<false>(scores, out,
                                   {folded, folded ? static_cast<float>(p.score_mod.scale) * kLog2e : kLog2e});
    if constexpr (kGeneric) {
      if (p.dropout.enabled()) rows_of_warp().drop(scores, first_key);
    }
    tile::multiply_registers(out, scores, shared.tiles.v[stage].template rows_from<kWarpKeys>(row_in_tile));
  }

  __device__ __forceinline__ void store_results() {
    const float scale = folds_scale() ? static_cast<float>(p.score_mod.scale) : 1.0f;
    auto& results = shared.results;
#pragma unroll
    for (int r = 0; r < Output::kThreadRows; ++r) {
      const int row = row_warp() * kWarpRows + Output::row(r);
      const attention::SoftmaxState<float> state = running.state(r, scale);
      if (tile::lane() % 4 == 0) results.state[key_warp()][row] = {state.m, state.l};
      float* target = results.out[key_warp()][row] + Output::column(0, 0);
#pragma unroll
      for (int j = 0; j < Output::kColumnTiles; ++j) {
        *reinterpret_cast<float2*>(target + 8 * j) = {out.at(r, j, 0), out.at(r, j, 1)};
      }
    }
  }
};

// Iterates over the work tiles of the CTA's range.
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kTile.ctas_per_sm)
    split_kernel(const __grid_constant__ SplitParams p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  ptx::wait_for_kernel_before();
  ptx::allow_dependent_launch();
  if (Kernel::kAppends && blockIdx.x >= p.stream_k.blocks) {
    const uint32_t first = (blockIdx.x - p.stream_k.blocks) * Kernel::kWarps + tile::warp();
    common::copy_appended_rows<typename Kernel::Element>(p.append, first,
                                                         (gridDim.x - p.stream_k.blocks) * Kernel::kWarps);
    return;
  }
  StreamKRange<Kernel::kTile.keys> range(p, p.stream_k);
  Kernel kernel = {p, *reinterpret_cast<typename Kernel::Shared*>(shared_memory), range, {}};
  int slot = static_cast<int>(blockIdx.x) * kSlotsPerBlock;
#pragma unroll 1
  while (range.enter()) {
    const uint32_t count = range.keys.count();
    const uint32_t index = range.work_tile_in_entry(count);
    const uint32_t begin = range.at - range.entry_begin - index * count;
    const uint32_t end = min(count, begin + (range.end - range.at));
    kernel.work_tile = p.stream_k.tiles.work_tile(index);
    const int first_tile = range.keys.tiles.begin;
    // A work tile that sees no key still has one tile in the work list, which has nothing to compute.
    const bool nothing = range.keys.tiles.empty();
    kernel.attend(first_tile + static_cast<int>(nothing ? 0 : begin), first_tile + static_cast<int>(nothing ? 0 : end));
    TileSplits& splits = p.work_tiles[range.entry * range.work_tiles_of_entry() + index];
    const bool whole = begin == 0 && end == count;
    if (begin == 0 && threadIdx.x == 0 && (whole || !p.stream_k.known.present())) {
      splits = range.shares.splits(range.at, range.at + count);
    }
    if (kernel.finish(whole, slot)) splits.count = TileSplits::kHasNan;
    slot = static_cast<int>(blockIdx.x) * kSlotsPerBlock + 1;
    range.at += end - begin;
  }
}

}  // namespace flash_attn_ext::sm80
