// Copies a warp's tile of a bias or mask to shared memory, 16 bytes of a row at a time, while the GEMMs run.
#pragma once

#include "kernels/score/bias_mask.cuh"
#include "ptx/cp_async.h"

namespace flash_attn_ext {

// Elements that do not exist are zero-padded.
template <class Element, class Tile>
__device__ __forceinline__ void stage(StagedTile<Element, Tile>& target, const attention::BroadcastView& view,
                                      const Tile& where) {
  constexpr int kRowBytes = StagedTile<Element, Tile>::kRowBytes;
  constexpr int kChunk = 16 / sizeof(Element);
  constexpr int kChunks = Tile::kKeys / kChunk;
  const Element* origin = static_cast<const Element*>(view.data) + view.offset(where.first());
  const int queries = where.num_queries();
  const int keys = where.num_keys();
  // Whole chunks only: the memory after the last element may not exist, and compute-sanitizer checks all 16 bytes.
  const bool in_chunks =
      view.key_stride == 1 && (view.query_stride | keys) % kChunk == 0 && reinterpret_cast<uintptr_t>(origin) % 16 == 0;
  if (in_chunks) {
    constexpr int kStep = tile::kWarpSize / kChunks;  // queries at a time
    const int first_query = tile::lane() / kChunks;
    // Whether all lanes, and all rows of the last step, have a chunk.
    constexpr bool kEven = tile::kWarpSize % kChunks == 0 && Tile::kQueries % kStep == 0;
    if (!kEven && first_query >= min(kStep, Tile::kQueries)) return;
    const int key = tile::lane() % kChunks * kChunk;
    const Element* source = origin + first_query * view.query_stride + key;
    const uint32_t address = target.address(first_query, key);
#pragma unroll
    for (int query = 0; query < Tile::kQueries; query += kStep) {
      if (!kEven && first_query + query >= Tile::kQueries) break;
      ptx::copy_async_16(address + query * kRowBytes, source, first_query + query < queries && key < keys ? 16 : 0);
      source += kStep * view.query_stride;
    }
    return;
  }
  // Loads in flight. Neither warps of 32 rows nor the small tiles of large head dims have registers for several.
  constexpr int kBatch = Tile::Accumulator::kRowTiles == 1 && Tile::kQueries * Tile::kKeys > 256 ? 8 : 1;
#pragma unroll 1
  for (int first = tile::lane(); first < Tile::kQueries * Tile::kKeys; first += kBatch * tile::kWarpSize) {
    Element batch[kBatch];
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      const int query = (first + n * tile::kWarpSize) / Tile::kKeys;
      const int key = (first + n * tile::kWarpSize) % Tile::kKeys;
      const bool exists = query < queries && key < keys;
      batch[n] = exists ? origin[query * view.query_stride + key * view.key_stride] : Element{};
    }
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      const int query = (first + n * tile::kWarpSize) / Tile::kKeys;
      const int key = (first + n * tile::kWarpSize) % Tile::kKeys;
      *reinterpret_cast<Element*>(target.data + query * kRowBytes + key * sizeof(Element)) = batch[n];
    }
  }
}

// Writes the tile of a mask that intervals stand for, or that they narrow: 8 keys of a query at a time.
template <class Tile>
__device__ __forceinline__ void stage_intervals(StagedTile<uint8_t, Tile>& target, const Tile& where) {
  constexpr int kKeysAtOnce = 8;
  constexpr int kGroups = Tile::kKeys / kKeysAtOnce;
  static_assert(Tile::kKeys % kKeysAtOnce == 0);
  const attention::BroadcastView& mask = where.p.score_mod.mask;
  const attention::RowIntervals& intervals = where.p.score_mod.intervals;
  const attention::Coordinate first = where.first();
  const int queries = where.num_queries();
  const int keys = where.num_keys();
#pragma unroll 1
  for (int i = tile::lane(); i < Tile::kQueries * kGroups; i += tile::kWarpSize) {
    const int query = i / kGroups;
    const int key = i % kGroups * kKeysAtOnce;
    uint32_t seen = 0;
    if (query < queries) {
      const int32_t* row = intervals.row(where.item.sequence, first.head, first.query + query);
      seen = intervals.word(row, static_cast<int>(first.key) + key) & 0xFFu;
      if (mask.present()) {
        const auto* bytes = static_cast<const uint8_t*>(mask.data) + mask.offset(first) + query * mask.query_stride;
#pragma unroll 1
        for (int n = 0; n < kKeysAtOnce; ++n) {
          if (key + n >= keys || bytes[(key + n) * mask.key_stride] == 0) seen &= ~(1u << n);
        }
      }
    }
    // A byte for each bit.
    const uint32_t low = (seen & 0xFu) * 0x00204081u & 0x01010101u;
    const uint32_t high = (seen >> 4) * 0x00204081u & 0x01010101u;
    *reinterpret_cast<uint2*>(target.data + query * StagedTile<uint8_t, Tile>::kRowBytes + key) = {low, high};
  }
}

// Called when no lane of the warp reads the preceding tile any more.
template <class Element, class Tile, bool kHasBias>
__device__ __forceinline__ void stage(StagedBiasMask<Element, Tile, kHasBias>& target, const Tile& where,
                                      bool with_mask) {
  const attention::ScoreMod& mod = where.p.score_mod;
  if constexpr (kHasBias) {
    if (target.stages(mod.bias)) stage(target.bias, mod.bias, where);
  }
  if (!with_mask) return;
  if (mod.intervals.present()) {
    stage_intervals(target.mask, where);
  } else {
    stage(target.mask, mod.mask, where);
  }
}

}  // namespace flash_attn_ext
