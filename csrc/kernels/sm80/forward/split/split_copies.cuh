// Arguments of the split-KV kernel, and loads of its CTA into shared memory: its rows of Q, and tiles of K and V.
#pragma once

#include "attention/append.h"
#include "kernels/common/rows/appended_row.cuh"
#include "kernels/common/rows/merged_row.cuh"
#include "kernels/schedule/stream_k.cuh"
#include "tile/sm80/copy_rows.h"

namespace flash_attn_ext::sm80 {

struct SplitParams : attention::AppendingForwardParams {
  StreamK stream_k;
  common::SplitRows splits;
  TileSplits* work_tiles;  // one for each work tile
};

template <class Kernel>
struct SplitCopies {
  using Element = typename Kernel::Element;
  using QTile = typename Kernel::QTile;
  using KTile = typename Kernel::KTile;
  using VTile = typename Kernel::VTile;
  using Place = tile::CopyPlace<Kernel::kThreads, KTile>;
  static constexpr SplitTile kTile = Kernel::kTile;
  static constexpr int kHeadDim = Kernel::kHeadDim;
  static constexpr int kColumns = Kernel::kColumns;
  static constexpr int kWarpRows = Kernel::kWarpRows;
  static constexpr bool kGeneric = Kernel::kGeneric;
  static constexpr bool kAppends = Kernel::kAppends;

  const SplitParams& p;
  typename Kernel::Tiles& tiles;
  const EntryKeys& keys;
  const RowTiles::WorkTile& work_tile;

  // Issues the copies of Q; they are committed with those of the first key tile.
  __device__ __forceinline__ void load_queries() {
    constexpr int kChunks = QTile::kChunksPerRow;
    const bool rotates = kAppends && p.append.rotary.present();
#pragma unroll 1
    for (int index = threadIdx.x; index < kTile.rows * kChunks; index += Kernel::kThreads) {
      const int row = index / kChunks;
      const int column = index % kChunks * QTile::kChunk;
      const bool exists = row < keys.num_rows;
      const PackedRow at = p.stream_k.tiles.at(keys.first_row + (exists ? row : 0), work_tile.head);
      const attention::Sequence& sequence = keys.sequence;
      if (rotates) {
        const auto rotated = appended().query(sequence.batch, at.head, at.query, num_old_keys());
        store_chunk(tiles.q, {row, column}, rotated, exists ? static_cast<int>(p.head_dim_qk) - column : 0);
        continue;
      }
      const auto* source = p.q.row<const Element>(sequence.batch, at.head, sequence.query_begin + at.query) + column;
      ptx::copy_async_16(tiles.q.address(row, column), source,
                         exists ? valid_bytes(static_cast<int>(p.head_dim_qk) - column) : 0);
    }
  }

  // Issues the copies of a key tile. Keys past the end of the sequence are zero-padded and not read.
  __device__ __forceinline__ void load(int stage, int tile) {
    if constexpr (kAppends) {
      if (may_hold_new_keys(tile)) {
        load_with_new(stage, tile);
        return;
      }
    }
    const attention::Sequence& sequence = keys.sequence;
    const int column = Place::column();
    const Targets to = targets(stage);
    constexpr int kSteps = kTile.keys / Place::kRowStep;
    constexpr int kWholeUnrolled = kGeneric ? 1 : kSteps;
    if (kCopiesWhole && is_whole(tile)) {
      const attention::KeyRow at = p.key_row(sequence, tile * kTile.keys + Place::row());
      const auto* k = p.k.row<const Element>(at.entry, work_tile.head, at.row) + column;
      const auto* v = p.v.row<const Element>(at.entry, work_tile.head, at.row) + first_column() + column;
#pragma unroll kWholeUnrolled
      for (int step = 0; step < kTile.keys; step += Place::kRowStep) {
#pragma unroll
        for (int group = 0; group < kHeadDim; group += KTile::kGroup) {
          ptx::copy_async_16(to.after(step).k + group * sizeof(Element), k + group, 16);
        }
#pragma unroll
        for (int group = 0; group < kColumns; group += VTile::kGroup) {
          ptx::copy_async_16(to.after(step).v + group * sizeof(Element), v + group, 16);
        }
        k += Place::kRowStep * p.k.row_stride;
        v += Place::kRowStep * p.v.row_stride;
      }
      return;
    }
    // Unrolled as far as registers allow.
    constexpr int kUnrolled = kGeneric || kWarpRows == 32 || sizeof(Element) * kHeadDim > 512 ? 1
                              : kTile.rows == 32                                              ? 2
                                                                                              : kSteps;
#pragma unroll kUnrolled
    for (int step = 0; step < kTile.keys; step += Place::kRowStep) {
      load_key(to.after(step), tile * kTile.keys + Place::row() + step);
    }
  }

 private:
  __device__ __forceinline__ int first_column() const { return static_cast<int>(work_tile.slice) * kColumns; }

  // How many of 16 bytes are valid where a row has `columns` columns left.
  __device__ __forceinline__ static int valid_bytes(int columns) {
    return min(max(columns, 0), QTile::kChunk) * static_cast<int>(sizeof(Element));
  }

  // Whether whole tiles have a path of their own, with fewer instructions, where registers are left. It gains nothing
  // for more rows, which are not memory-bound.
  static constexpr bool kCopiesWhole = kWarpRows == 16 && (!kGeneric || kTile.rows == 16);

  // Whether the keys of a tile exist, lie in consecutive rows, and have the full width of the tile.
  __device__ __forceinline__ bool is_whole(int tile) const {
    return !p.cache.paged() && (tile + 1) * kTile.keys <= static_cast<int>(keys.sequence.num_keys) &&
           p.head_dim_qk == kHeadDim && static_cast<int>(p.head_dim_v) - first_column() >= kColumns;
  }

  __device__ __forceinline__ common::AppendedRows<Element> appended() const { return {p.append}; }
  // How many keys the cache has before this call.
  __device__ __forceinline__ int num_old_keys() const {
    return static_cast<int>(p.cache.num_old(keys.sequence.batch, p.sequences.max_seqlen_k));
  }
  __device__ __forceinline__ bool may_hold_new_keys(int tile) const {
    return p.append.present() && (tile + 1) * kTile.keys > static_cast<int>(keys.sequence.num_keys - p.cache.num_new);
  }

  struct ChunkPlace {
    int row;
    int column;
  };
  // Stores 16 bytes of a row that comes through registers and has `columns` elements left. first_of_tile: the row's
  // column that is the tile's first column.
  template <class Tile>
  __device__ __forceinline__ static void store_chunk(const Tile& tile, const ChunkPlace& at,
                                                     const common::RotatedRow<Element>& row, int columns,
                                                     int first_of_tile = 0) {
    constexpr int kAtOnce = 4;
    Element* const to = const_cast<Element*>(&tile.at(at.row, at.column));
#pragma unroll kAtOnce
    for (int i = 0; i < Tile::kChunk; ++i) {
      to[i] = i < columns ? row.at(first_of_tile + at.column + i) : Element(0.0f);
    }
  }

  // The addresses of the thread's first chunks of a tile.
  struct Targets {
    uint32_t k;
    uint32_t v;
    __device__ __forceinline__ Targets after(int rows) const {
      return {k + rows * KTile::kRowBytes, v + rows * VTile::kRowBytes};
    }
  };
  __device__ __forceinline__ Targets targets(int stage) const {
    return {tiles.k[stage].address(Place::row(), Place::column()),
            tiles.v[stage].address(Place::row(), Place::column())};
  }

  // Issues the copies of the thread's chunks of a key.
  __device__ __forceinline__ void load_key(const Targets& to, int key) {
    const attention::Sequence& sequence = keys.sequence;
    const int column = Place::column();
    const int columns_k = static_cast<int>(p.head_dim_qk) - column;
    const int columns_v = static_cast<int>(p.head_dim_v) - first_column() - column;
    const bool exists = key < sequence.num_keys;
    const attention::KeyRow at = exists ? p.key_row(sequence, key) : attention::KeyRow{0, 0};
    const auto* k = p.k.row<const Element>(at.entry, work_tile.head, at.row) + column;
    const auto* v = p.v.row<const Element>(at.entry, work_tile.head, at.row) + first_column() + column;
#pragma unroll
    for (int group = 0; group < kHeadDim; group += KTile::kGroup) {
      ptx::copy_async_16(to.k + group * sizeof(Element), k + group, exists ? valid_bytes(columns_k - group) : 0);
    }
#pragma unroll
    for (int group = 0; group < kColumns; group += VTile::kGroup) {
      ptx::copy_async_16(to.v + group * sizeof(Element), v + group, exists ? valid_bytes(columns_v - group) : 0);
    }
  }

  // Loads the thread's chunks of a tile in which some keys are new.
  __device__ __forceinline__ void load_with_new(int stage, int tile) {
    const attention::Sequence& sequence = keys.sequence;
    const int num_old = num_old_keys();
#pragma unroll 1
    for (int step = 0; step < kTile.keys; step += Place::kRowStep) {
      const int row = Place::row() + step;
      const int key = tile * kTile.keys + row;
      if (key < num_old || key >= sequence.num_keys) {
        load_key(targets(stage).after(step), key);
        continue;
      }
      const auto k = appended().key(sequence.batch, work_tile.head, key - num_old, num_old);
      const auto v = appended().value(sequence.batch, work_tile.head, key - num_old);
#pragma unroll 1
      for (int column = Place::column(); column < kHeadDim; column += KTile::kGroup) {
        store_chunk(tiles.k[stage], {row, column}, k, static_cast<int>(p.head_dim_qk) - column);
      }
#pragma unroll 1
      for (int column = Place::column(); column < kColumns; column += VTile::kGroup) {
        store_chunk(tiles.v[stage], {row, column}, v, static_cast<int>(p.head_dim_v) - first_column() - column,
                    first_column());
      }
    }
  }
};

}  // namespace flash_attn_ext::sm80
