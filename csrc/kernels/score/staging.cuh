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

// The intervals and blocks of a tile, by pointers: copies of RowIntervals and BlockMask would take more registers.
struct SelectedKeysOfTile {
  const attention::ScoreMod* mod;
  const int32_t* intervals;  // of the tile's first query, or null
  int queries;               // that exist
  int batch;
  int head;
  int first_query;
  int first_key;
};

template <class Tile>
__device__ __forceinline__ SelectedKeysOfTile selected_keys_of(const Tile& where) {
  const attention::ScoreMod& mod = where.p.score_mod;
  const bool has_intervals = mod.intervals.present();
  return {.mod = &mod,
          .intervals =
              has_intervals ? mod.intervals.row(where.coord.sequence, where.coord.head, where.query(0, 0)) : nullptr,
          .queries = where.num_queries(),
          .batch = static_cast<int>(where.coord.sequence.batch),
          .head = static_cast<int>(where.coord.head),
          .first_query = static_cast<int>(where.query(0, 0)),
          .first_key = static_cast<int>(where.key(0, 0))};
}

// Writes the tile of a mask that intervals, blocks or both stand for: 8 keys of a query at a time, which belong to one
// block.
template <class Tile>
__device__ __forceinline__ void stage_selected(StagedTile<uint8_t, Tile>& target, const SelectedKeysOfTile& of) {
  constexpr int kKeysAtOnce = 8;
  constexpr int kGroups = Tile::kKeys / kKeysAtOnce;
  static_assert(Tile::kKeys % kKeysAtOnce == 0);
  const attention::RowIntervals& intervals = of.mod->intervals;
  const attention::BlockMask& blocks = of.mod->blocks;
#pragma unroll 1
  for (int i = tile::lane(); i < Tile::kQueries * kGroups; i += tile::kWarpSize) {
    const int query = i / kGroups;
    const int key = i % kGroups * kKeysAtOnce;
    uint32_t seen = 0;
    if (query < of.queries) {
      seen = of.intervals == nullptr
                 ? ~uint32_t{0}
                 : intervals.word(of.intervals + query * intervals.query_stride, of.first_key + key);
      if (blocks.present() && !blocks.sees(blocks.row(of.batch, of.head, of.first_query + query), of.first_key + key)) {
        seen = 0;
      }
    }
    // A byte for each bit.
    const uint32_t low = (seen & 0xFu) * 0x00204081u & 0x01010101u;
    const uint32_t high = (seen >> 4 & 0xFu) * 0x00204081u & 0x01010101u;
    *reinterpret_cast<uint2*>(target.data + query * StagedTile<uint8_t, Tile>::kRowBytes + key) = {low, high};
  }
}

// The same as a function that is called, since a mainloop that it is part of would spill registers.
template <class Tile>
__device__ __noinline__ void call_stage_selected(StagedTile<uint8_t, Tile>* target, const SelectedKeysOfTile of) {
  stage_selected(*target, of);
}

// Clears the bytes of keys that the mask hides, too. Each lane has the bytes that stage_selected() gave it.
template <class Tile>
__device__ __forceinline__ void narrow_by_mask(StagedTile<uint8_t, Tile>& target, const Tile& where) {
  constexpr int kGroups = Tile::kKeys / 8;
  const attention::BroadcastView& mask = where.p.score_mod.mask;
  const auto* const origin = static_cast<const uint8_t*>(mask.data) + mask.offset(where.first());
#pragma unroll 1
  for (int i = tile::lane() * 8; i < Tile::kQueries * Tile::kKeys; i += i % 8 == 7 ? 8 * tile::kWarpSize - 7 : 1) {
    const int query = i / 8 / kGroups;
    const int key = i / 8 % kGroups * 8 + i % 8;
    if (query >= where.num_queries() || key >= where.num_keys()) continue;
    if (origin[query * mask.query_stride + key * mask.key_stride] != 0) continue;
    target.data[query * StagedTile<uint8_t, Tile>::kRowBytes + key] = 0;
  }
}

// Called when no lane of the warp reads the preceding tile any more. may_call: a constant that is false in kernels with
// wgmma, whose instructions ptxas would serialise if the kernel called a function.
template <class Element, class Tile, bool kHasBias>
__device__ __forceinline__ void stage(StagedBiasMask<Element, Tile, kHasBias>& target, const Tile& where,
                                      bool with_mask, bool may_call = true) {
  const attention::ScoreMod& mod = where.p.score_mod;
  if constexpr (kHasBias) {
    if (target.stages(mod.bias)) stage(target.bias, mod.bias, where);
  }
  if (!with_mask) return;
  if (mod.selects_keys()) {
    if (may_call) {
      call_stage_selected(&target.mask, selected_keys_of(where));
    } else {
      stage_selected(target.mask, selected_keys_of(where));
    }
    if (mod.mask.present()) narrow_by_mask(target.mask, where);
  } else {
    stage(target.mask, mod.mask, where);
  }
}

}  // namespace flash_attn_ext
