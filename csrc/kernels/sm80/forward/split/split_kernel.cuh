// Forward pass of few queries that see long keys: O = softmax(score(Q K^T)) V, with the keys divided among blocks.
//
// Grid: resident blocks, each with a stretch of the tiles of keys of all items (schedule/key_division.cuh). The rows of
// a tile are the queries of all heads that share keys (schedule/row_tiles.cuh), so K and V are read once. A warp owns
// some rows and a part of each tile's keys, with an O, m and l of its own. At an item's end a block merges its warps';
// an item that it had all keys of is finished, of another one it leaves its part in the workspace, for the kernel that
// joins them (common/combine.h).
// New keys of a cache are read from where the call has them, and rotated here. Blocks behind the others write them to
// the cache, where only the next kernel looks for them. Shared memory: Q, and `stages` tiles of K and V; at an item's
// end, the warps' O in their place.
#pragma once

#include "kernels/common/rows/merged_row.cuh"
#include "kernels/schedule/key_division.cuh"
#include "kernels/score/softmax.cuh"
#include "kernels/sm80/forward/split/packed_rows.cuh"
#include "kernels/sm80/forward/split/params.h"
#include "kernels/sm80/forward/split/split_copies.cuh"
#include "kernels/tile_config_split.h"
#include "ptx/dependent_launch.h"
#include "tile/sm80/copy_rows.h"
#include "tile/sm80/gemm.h"

namespace flash_attn_ext::sm80 {

// Calls that append to a cache have kernels of their own: in the others it would take registers, and instructions for
// each tile (one query of 4k keys: 0.887 of cuDNN's time instead of 0.865).
struct SplitForm {
  SplitKind kind;
  bool appends;
};

template <class ElementType, int kHeadDimValue, SplitForm kForm>
struct SplitKernel {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimValue;
  static constexpr bool kExtended = is_extended(kForm.kind);
  static constexpr bool kAppends = kForm.appends;
  static constexpr SplitTile kTile = split_tile(sizeof(Element), kHeadDim, kForm.kind);
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
  using Terms = typename Rows::Terms;
  using Merged = common::MergedRow<kColumns>;

  struct Tiles {
    QTile q;
    KTile k[kTile.stages];
    VTile v[kTile.stages];
  };
  // Rows 8 floats longer than their columns: neighbouring ones begin in different banks.
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
  const KeyStretch<kTile.keys>& stretch;
  RowTiles::Item item;
  Output out;
  OnlineSoftmax<Output::kThreadRows> running;

  __device__ __forceinline__ static int row_warp() { return tile::warp() % kTile.row_warps; }
  __device__ __forceinline__ static int key_warp() { return tile::warp() / kTile.row_warps; }
  __device__ __forceinline__ int num_rows() const { return stretch.keys.num_rows; }
  __device__ __forceinline__ PackedRow packed_row(int row) const {
    return p.division.tiles.at(stretch.keys.first_row + row, item.head);
  }
  __device__ __forceinline__ int first_column() const { return static_cast<int>(item.slice) * kColumns; }

  // Scores that are only scaled keep the scale for the exponent.
  __device__ __forceinline__ bool folds_scale() const { return !kExtended || p.score_mod.only_scales(); }

  // Tiles [begin, end) of the item's keys.
  __device__ __forceinline__ void attend(int begin, int end) {
    out.clear();
    running.clear();
    if (begin == end) return;
    int stage = 0;
#pragma unroll 1
    for (int tile = begin - kTile.stages; tile < end; ++tile) {
      if (tile >= begin) {
        Terms terms;
        if constexpr (kFetchesEarly) rows_of_warp().fetch(terms, first_key_of_warp(tile));
        ptx::wait_copies<kTile.stages - 1>();
        __syncthreads();  // the tile has arrived
        step(stage, tile, terms);
        __syncthreads();  // and has no readers any more
      }
      if (tile + kTile.stages < end) copies().load(stage, tile + kTile.stages);
      if (tile == begin - kTile.stages)
        copies().load_queries();  // keys first: it takes memory longer to begin with them
      ptx::commit_copies();       // also where there is nothing, so that tiles can be counted
      stage = stage + 1 == kTile.stages ? 0 : stage + 1;
    }
  }

  // The block's rows of O, merged: of a whole item or as its part, in a slot. Returns whether a NaN came out in the
  // thread's rows of a whole one.
  __device__ __forceinline__ bool finish(bool whole, int slot) {
    leave_results();
    __syncthreads();
    bool has_nan = false;
    if (whole) {
#pragma unroll 1
      for (int row = tile::warp(); row < num_rows(); row += kWarps) {
        const attention::Sequence& sequence = stretch.keys.sequence;
        const PackedRow at = packed_row(row);
        const common::RowPlace place = {sequence.batch, at.head, sequence.query_begin + at.query};
        Merged merged = merge(row);
        has_nan |= common::finish_row<Element>(p, place, merged, first_column());
      }
    } else {
      constexpr int kAtOnce = kTile.rows == 16 ? 1 : 2;
#pragma unroll kAtOnce
      for (int row = tile::warp(); row < num_rows(); row += kWarps) merge(row).store(p.parts, slot, row);
    }
    __syncthreads();  // the next item's tiles come
    return has_nan;
  }

 private:
  // What the warps left of a row.
  __device__ __forceinline__ Merged merge(int row) const {
    Merged merged;
#pragma unroll
    for (int part = 0; part < kTile.key_warps; ++part) {
      merged.add(shared.results.state[part][row], shared.results.out[part][row]);
    }
    return merged;
  }

  __device__ __forceinline__ SplitCopies<SplitKernel> copies() const { return {p, shared.tiles, stretch.keys, item}; }

  // Before the keys have arrived, where registers are left.
  static constexpr bool kFetchesEarly = kExtended && kTile.rows == 16;

  // Found anew for each tile that needs them: no register is held for them.
  __device__ __forceinline__ Rows rows_of_warp() const {
    Rows rows(p, stretch.keys.sequence);
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

  __device__ __forceinline__ void step(int stage, int tile, Terms& terms) {
    const int row_in_tile = key_warp() * kWarpKeys;
    const int first_key = first_key_of_warp(tile);
    Scores scores;
    scores.clear();
    tile::multiply_head_dims(scores, shared.tiles.q, row_warp() * kWarpRows,
                             shared.tiles.k[stage].template rows_from<kWarpKeys>(row_in_tile));
    const bool folded = folds_scale();
    const bool full = stretch.keys.tiles.full(tile);
    if (kExtended || !full) {
      const Rows rows = rows_of_warp();
      if constexpr (kExtended && !kFetchesEarly) rows.fetch(terms, first_key);
      if constexpr (kExtended) rows.modify(scores, terms, first_key, folded);
      if (!full) rows.hide_invisible(scores, first_key);
    }
    running.template update<false>(scores, out,
                                   {folded, folded ? static_cast<float>(p.score_mod.scale) * kLog2e : kLog2e});
    if constexpr (kExtended) {
      if (p.dropout.enabled()) rows_of_warp().drop(scores, first_key);
    }
    tile::multiply_registers(out, scores, shared.tiles.v[stage].template rows_from<kWarpKeys>(row_in_tile));
  }

  __device__ __forceinline__ void leave_results() {
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

// The items that a block's stretch meets, one after the other.
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kTile.blocks)
    split_kernel(const __grid_constant__ SplitParams p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  ptx::wait_for_kernel_before();
  ptx::allow_dependent_launch();
  if (Kernel::kAppends && blockIdx.x >= p.division.blocks) {
    const uint32_t first = (blockIdx.x - p.division.blocks) * Kernel::kWarps + tile::warp();
    common::copy_appended_rows<typename Kernel::Element>(p.append, first,
                                                         (gridDim.x - p.division.blocks) * Kernel::kWarps);
    return;
  }
  KeyStretch<Kernel::kTile.keys> stretch(p, p.division);
  Kernel kernel = {p, *reinterpret_cast<typename Kernel::Shared*>(shared_memory), stretch, {}};
  int slot = static_cast<int>(blockIdx.x) * kSlotsPerBlock;
#pragma unroll 1
  while (stretch.enter()) {
    const uint32_t count = stretch.keys.count();
    const uint32_t index = stretch.item_in_entry(count);
    const uint32_t begin = stretch.at - stretch.entry_begin - index * count;
    const uint32_t end = min(count, begin + (stretch.end - stretch.at));
    kernel.item = p.division.tiles.item(index);
    const int first_tile = stretch.keys.tiles.begin;
    // Of an item that sees nothing there is a tile in the line, and none to work on.
    const bool nothing = stretch.keys.tiles.empty();
    kernel.attend(first_tile + static_cast<int>(nothing ? 0 : begin), first_tile + static_cast<int>(nothing ? 0 : end));
    ItemParts& parts = p.items[stretch.entry * stretch.items_of_entry() + index];
    const bool whole = begin == 0 && end == count;
    if (begin == 0 && threadIdx.x == 0 && (whole || !p.division.known.present())) {
      parts = stretch.shares.parts(stretch.at, stretch.at + count);
    }
    if (kernel.finish(whole, slot)) parts.count = ItemParts::kHasNan;
    slot = static_cast<int>(blockIdx.x) * kSlotsPerBlock + 1;
    stretch.at += end - begin;
  }
}

}  // namespace flash_attn_ext::sm80
