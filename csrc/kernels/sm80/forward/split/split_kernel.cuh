// Forward pass of few queries that see long keys: O = softmax(score(Q K^T)) V, with the keys divided among blocks.
//
// Grid: resident blocks, each with a stretch of the tiles of keys of all items (schedule/key_division.cuh). The rows of
// a tile are the queries of all heads that share keys (schedule/row_tiles.cuh), so K and V are read once. A warp owns
// some rows and a part of each tile's keys, with an O, m and l of its own. At an item's end a block merges its warps';
// an item that it had all keys of is finished, of another one it leaves its part in the workspace, for the kernel that
// joins them (common/combine.h).
// Shared memory: Q, and `stages` tiles of K and V; at an item's end, the warps' O in their place.
#pragma once

#include "kernels/common/rows/merged_row.cuh"
#include "kernels/schedule/key_division.cuh"
#include "kernels/score/softmax.cuh"
#include "kernels/sm80/forward/split/packed_rows.cuh"
#include "kernels/sm80/forward/split/params.h"
#include "kernels/tile_config_split.h"
#include "ptx/dependent_launch.h"
#include "tile/sm80/copy_rows.h"
#include "tile/sm80/gemm.h"

namespace flash_attn_ext::sm80 {

template <class ElementType, int kHeadDimValue, SplitKind kKind>
struct SplitKernel {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimValue;
  static constexpr bool kExtended = is_extended(kKind);
  static constexpr SplitTile kTile = split_tile(sizeof(Element), kHeadDim, kKind);
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
      if (tile + kTile.stages < end) load(stage, tile + kTile.stages);
      if (tile == begin - kTile.stages) load_queries();  // keys first: it takes memory longer to begin with them
      ptx::commit_copies();                              // also where there is nothing, so that tiles can be counted
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

  // Committed with the first tile of keys.
  __device__ __forceinline__ void load_queries() {
    constexpr int kChunks = QTile::kChunksPerRow;
#pragma unroll 1
    for (int index = threadIdx.x; index < kTile.rows * kChunks; index += kThreads) {
      const int row = index / kChunks;
      const int column = index % kChunks * QTile::kChunk;
      const bool exists = row < num_rows();
      const PackedRow at = packed_row(exists ? row : 0);
      const attention::Sequence& sequence = stretch.keys.sequence;
      const auto* source = p.q.row<const Element>(sequence.batch, at.head, sequence.query_begin + at.query) + column;
      ptx::copy_async_16(shared.tiles.q.address(row, column), source,
                         exists ? valid_bytes(static_cast<int>(p.head_dim_qk) - column) : 0);
    }
  }

  // Of 16 bytes, where so many columns are left of a row.
  __device__ __forceinline__ static int valid_bytes(int columns) {
    return min(max(columns, 0), QTile::kChunk) * static_cast<int>(sizeof(Element));
  }

  // Fewer instructions for most tiles, where registers are left: what bounds the others is not memory.
  static constexpr bool kCopiesWhole = kWarpRows == 16 && (!kExtended || kTile.rows == 16);

  // Its keys exist and have neighbouring rows, as wide as those of a tile.
  __device__ __forceinline__ bool is_whole(int tile) const {
    return !p.cache.paged() && (tile + 1) * kTile.keys <= static_cast<int>(stretch.keys.sequence.num_keys) &&
           p.head_dim_qk == kHeadDim && static_cast<int>(p.head_dim_v) - first_column() >= kColumns;
  }

  // Starts copying. Keys that the sequence does not have become zeros and are not read.
  __device__ __forceinline__ void load(int stage, int tile) {
    const attention::Sequence& sequence = stretch.keys.sequence;
    const int column = Place::column();
    const int columns_k = static_cast<int>(p.head_dim_qk) - column;
    const int columns_v = static_cast<int>(p.head_dim_v) - first_column() - column;
    const uint32_t target_k = shared.tiles.k[stage].address(Place::row(), column);
    const uint32_t target_v = shared.tiles.v[stage].address(Place::row(), column);
    constexpr int kSteps = kTile.keys / Place::kRowStep;
    constexpr int kWholeUnrolled = kExtended ? 1 : kSteps;
    if (kCopiesWhole && is_whole(tile)) {
      const attention::KeyRow at = p.key_row(sequence, tile * kTile.keys + Place::row());
      const auto* k = p.k.row<const Element>(at.entry, item.head, at.row) + column;
      const auto* v = p.v.row<const Element>(at.entry, item.head, at.row) + first_column() + column;
#pragma unroll kWholeUnrolled
      for (int step = 0; step < kTile.keys; step += Place::kRowStep) {
#pragma unroll
        for (int group = 0; group < kHeadDim; group += KTile::kGroup) {
          ptx::copy_async_16(target_k + (step * kHeadDim + group) * sizeof(Element), k + group, 16);
        }
#pragma unroll
        for (int group = 0; group < kColumns; group += VTile::kGroup) {
          ptx::copy_async_16(target_v + (step * kColumns + group) * sizeof(Element), v + group, 16);
        }
        k += Place::kRowStep * p.k.row_stride;
        v += Place::kRowStep * p.v.row_stride;
      }
      return;
    }
    // As far as registers allow.
    constexpr int kUnrolled = kExtended || kWarpRows == 32 || sizeof(Element) * kHeadDim > 512 ? 1
                              : kTile.rows == 32                                               ? 2
                                                                                               : kSteps;
#pragma unroll kUnrolled
    for (int step = 0; step < kTile.keys; step += Place::kRowStep) {
      const int key = tile * kTile.keys + Place::row() + step;
      const bool exists = key < sequence.num_keys;
      const attention::KeyRow at = exists ? p.key_row(sequence, key) : attention::KeyRow{0, 0};
      const auto* k = p.k.row<const Element>(at.entry, item.head, at.row) + column;
      const auto* v = p.v.row<const Element>(at.entry, item.head, at.row) + first_column() + column;
#pragma unroll
      for (int group = 0; group < kHeadDim; group += KTile::kGroup) {
        ptx::copy_async_16(target_k + (step * kHeadDim + group) * sizeof(Element), k + group,
                           exists ? valid_bytes(columns_k - group) : 0);
      }
#pragma unroll
      for (int group = 0; group < kColumns; group += VTile::kGroup) {
        ptx::copy_async_16(target_v + (step * kColumns + group) * sizeof(Element), v + group,
                           exists ? valid_bytes(columns_v - group) : 0);
      }
    }
  }

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
  ptx::allow_dependent_launch();
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
