// What the bias-stationary kernels of both passes share: the bias of a head, which stays in shared memory, or that of a
// sequence, the mask of a sequence, which batch entries a CTA has, and which rows it repairs.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/config/bias_stationary.h"
#include "kernels/score/score_tile.cuh"
#include "kernels/sm80/launch.cuh"
#include "kernels/sm80/nan_flags.cuh"
#include "ptx/cp_async.h"
#include "ptx/shared_memory.h"
#include "tile/element.h"

namespace flash_attn_ext::sm80 {

// The batch entries of a CTA, all of one head: every step-th one from the first on. So what all CTAs read and write at
// a time lies close together in memory, and the heads of an entry share in L2 what is the same for all, such as a mask.
struct BatchEntries {
  int head;
  int first;
  int step;
};
__device__ __forceinline__ BatchEntries batch_entries(const attention::AttentionParams& p) {
  const auto heads = static_cast<unsigned>(p.num_heads_q);
  return {static_cast<int>(blockIdx.x % heads), static_cast<int>(blockIdx.x / heads),
          static_cast<int>(gridDim.x / heads)};
}

// A batch entry of a head; there are no packed batches.
__device__ __forceinline__ HeadCoord coord_at(const attention::AttentionParams& p, int head, int entry) {
  return {{entry, 0, 0, p.sequences.max_seqlen_q, p.sequences.max_seqlen_k}, head, head / p.queries_per_key_head()};
}

// Calls function(coord, row) for each of the calling warp's rows in those of the CTA's batch entries in which the
// warp's flag is set. Rows may be past the end of the sequence.
template <class Kernel, class Function>
__device__ __forceinline__ void for_each_flagged_row(const attention::AttentionParams& p, uint8_t* flags,
                                                     const BatchEntries& entries, Function&& function) {
  const auto end = static_cast<int>(p.batch);
  const int first = tile::warp() * Kernel::kRowsPerWarp;
  __syncwarp();  // flags and rows are written
#pragma unroll 1
  for (int entry = entries.first; entry < end; entry += entries.step) {
    const HeadCoord coord = coord_at(p, entries.head, entry);
    if (flag_in_order_of_heads<Kernel::kTile.warps>(flags, p, coord) == 0) continue;
#pragma unroll 1
    for (int row = first; row < first + Kernel::kRowsPerWarp; ++row) function(coord, row);
  }
}

// A thread's bias, in pairs of packed Elements.
template <class Element, class Acc>
struct BiasPairs {
  static_assert(Acc::kRowTiles == 1 && Acc::kColumnTiles % 2 == 0);

  // Calls function(r, j, low, high) with each pair. words(i) returns the four pairs of column tiles 2i and 2i + 1.
  template <class Words, class Function>
  __device__ __forceinline__ static void for_each(Words&& words, Function&& function) {
    const auto call = [&](int r, int j, uint32_t pair) {
      function(r, j, ptx::to_float(static_cast<uint16_t>(pair), Element{}),
               ptx::to_float(static_cast<uint16_t>(pair >> 16), Element{}));
    };
#pragma unroll
    for (int j = 0; j < Acc::kColumnTiles; j += 2) {
      const uint4 of_tiles = words(j / 2);
      call(0, j, of_tiles.x);
      call(1, j, of_tiles.y);
      call(0, j + 1, of_tiles.z);
      call(1, j + 1, of_tiles.w);
    }
  }
};

// Whether position shows a query the key of a score.
template <class Where>
__device__ __forceinline__ bool sees(const Where& where, int row, int column) {
  const int64_t query = where.query(row, column);
  const int64_t key = where.key(row, column);
  const attention::Interval seen = where.p.visibility.keys_of(query, where.coord.sequence);
  return query < where.coord.sequence.num_queries && key >= seen.begin && key < seen.end;
}

// A head's tile of the bias in 16 bits, in the order in which the threads of a CTA hold scores: what a thread reads, it
// has written itself. It is -inf where position hides a key, so that visibility costs nothing in the loop over batch
// entries. Without a bias it is 0 elsewhere.
template <class Element, class Acc, int kThreads>
struct StationaryBias {
  uint4 data[Acc::kColumnTiles / 2][kThreads];  // two column tiles, and two rows of each

  template <class Where>
  __device__ __forceinline__ void load(const Where& where) {
    const attention::AttentionParams& p = where.p;
    const attention::BroadcastView& bias = p.score_mod.bias;
    const auto element_at = [&](int r, int column) {
      if (!sees(where, Acc::row(r), column)) return -INFINITY;
      if (!bias.present()) return 0.0f;
      const attention::Coordinate at = {where.coord.sequence.batch, where.coord.head, where.query(Acc::row(r), column),
                                        where.key(Acc::row(r), column)};
      return static_cast<float>(static_cast<const Element*>(bias.data)[bias.offset(at)]);
    };
    const auto pair_at = [&](int r, int j) {
      return ptx::pack(element_at(r, Acc::column(j, 0)), element_at(r, Acc::column(j, 1)), Element{});
    };
#pragma unroll 1
    for (int j = 0; j < Acc::kColumnTiles; j += 2) {
      data[j / 2][threadIdx.x] = {pair_at(0, j), pair_at(1, j), pair_at(0, j + 1), pair_at(1, j + 1)};
    }
  }

  template <class Function>
  __device__ __forceinline__ void for_each_pair(Function&& function) const {
    BiasPairs<Element, Acc>::for_each([&](int i) { return data[i][threadIdx.x]; }, function);
  }
};

// A thread's bias of a sequence.
template <class Element, class Acc>
struct BiasInRegisters {
  uint4 data[Acc::kColumnTiles / 2];

  template <class Function>
  __device__ __forceinline__ void for_each_pair(Function&& function) const {
    BiasPairs<Element, Acc>::for_each([&](int i) { return data[i]; }, function);
  }
};

// The bias of a sequence that has its own, as it lies in memory: the row of each query, from the multiple of 16 bytes
// before it on. The copies overlap the computation of the preceding sequence, and rows may begin anywhere. The chunks
// of a row are rotated by its number, so that the rows of a warp's threads lie in different banks.
template <class Element, int kThreads>
struct CopiedBias {
  static constexpr int kChunkBytes = 16;
  static constexpr int kRowBytes = kBiasStationaryTokens * int{sizeof(Element)};

  unsigned char rows[kBiasStationaryTokens][kRowBytes];

  // Whether each batch entry has a bias of its own, whose rows fit kRowBytes from the preceding multiple of 16 bytes
  // on, and the last of which ends at one. A copy of fewer than 16 bytes reads no more, but compute-sanitizer takes it
  // for one of 16.
  static bool fits(const attention::AttentionParams& p) {
    constexpr int64_t kChunk = kChunkBytes / sizeof(Element);
    const attention::BroadcastView& bias = p.score_mod.bias;
    if (!bias.present() || bias.batch_stride == 0 || bias.key_stride != 1) return false;
    const bool begins_at_chunks = reinterpret_cast<uintptr_t>(bias.data) % kChunkBytes == 0 &&
                                  (bias.batch_stride | bias.head_stride | bias.query_stride) % kChunk == 0;
    const int64_t last_row = (p.batch - 1) * bias.batch_stride + (p.num_heads_q - 1) * bias.head_stride +
                             (p.sequences.max_seqlen_q - 1) * bias.query_stride;
    const auto* const end = static_cast<const Element*>(bias.data) + last_row + p.sequences.max_seqlen_k;
    return reinterpret_cast<uintptr_t>(end) % kChunkBytes == 0 &&
           (begins_at_chunks || p.sequences.max_seqlen_k + kChunk - 1 <= kBiasStationaryTokens);
  }

  // Issues the copies; the thread commits them with its others. The first chunk of a row may begin up to 14 bytes
  // before it, but not before its allocation, which begins at a multiple of 16 bytes.
  __device__ __forceinline__ void copy(const attention::BroadcastView& bias, const HeadCoord& coord) {
    constexpr int kThreadsPerRow = kThreads / kBiasStationaryTokens;
    const int query = static_cast<int>(threadIdx.x) / kThreadsPerRow;
    const int own_chunk = static_cast<int>(threadIdx.x) % kThreadsPerRow;
    if (query >= coord.sequence.num_queries) return;
    const auto begin = reinterpret_cast<uintptr_t>(static_cast<const Element*>(bias.data) +
                                                   bias.offset({coord.sequence.batch, coord.head, query, 0}));
    const uintptr_t end = begin + coord.sequence.num_keys * sizeof(Element);
    const uint32_t target = ptx::shared_address(rows[query]);
#pragma unroll
    for (int chunk = 0; chunk < kRowBytes / kChunkBytes; chunk += kThreadsPerRow) {
      const uintptr_t source = (begin / kChunkBytes + own_chunk + chunk) * kChunkBytes;
      const uint32_t place = (query + own_chunk + chunk) * kChunkBytes % kRowBytes;
      if (source >= end) break;
      const auto bytes = static_cast<uint32_t>(min(end - source, uintptr_t{kChunkBytes}));
      ptx::copy_async_16(target + place, reinterpret_cast<const void*>(source), bytes);
    }
  }

  // One bit for each of the thread's scores: whether position hides it. These are the same for all batch entries.
  template <class Where>
  __device__ __forceinline__ static uint32_t hidden_by_position(const Where& where) {
    using Acc = typename Where::Accumulator;
    static_assert(4 * Acc::kColumnTiles <= 32);
    uint32_t hidden = 0;
#pragma unroll 1
    for (int j = 0; j < Acc::kColumnTiles; ++j) {
      for (int i = 0; i < 4; ++i) {
        if (!sees(where, Acc::row(i / 2), Acc::column(j, i % 2))) hidden |= 1u << bit(i / 2, j, i % 2);
      }
    }
    return hidden;
  }

  // Reads the thread's bias of a sequence, when the copies have arrived.
  template <class Where>
  __device__ __forceinline__ auto read(const Where& where, uint32_t hidden) const {
    using Acc = typename Where::Accumulator;
    const attention::BroadcastView& bias = where.p.score_mod.bias;
    const auto origin = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(
        static_cast<const Element*>(bias.data) + bias.offset({where.coord.sequence.batch, where.coord.head, 0, 0})));
    const auto row_bytes = static_cast<uint32_t>(bias.query_stride * sizeof(Element));
    constexpr uint32_t kNegativeInfinity = std::is_same_v<Element, __half> ? 0xfc00 : 0xff80;
    const auto element = [&](int r, int j, int e) -> uint32_t {
      const auto query = static_cast<uint32_t>(where.query(Acc::row(r), Acc::column(j, e)));
      const auto key = static_cast<uint32_t>(where.key(Acc::row(r), Acc::column(j, e)));
      const uint32_t first = (origin + query * row_bytes) % kChunkBytes + query * kChunkBytes;
      const uint32_t place = (first + key * sizeof(Element)) % kRowBytes;
      const uint32_t found = *reinterpret_cast<const uint16_t*>(rows[query] + place);
      return (hidden >> bit(r, j, e) & 1) != 0 ? kNegativeInfinity : found;
    };
    const auto pair = [&](int r, int j) { return element(r, j, 0) | element(r, j, 1) << 16; };
    BiasInRegisters<Element, Acc> own;
#pragma unroll
    for (int j = 0; j < Acc::kColumnTiles; j += 2) {
      own.data[j / 2] = {pair(0, j), pair(1, j), pair(0, j + 1), pair(1, j + 1)};
    }
    return own;
  }

 private:
  __device__ __forceinline__ static constexpr int bit(int r, int j, int e) { return 4 * j + 2 * r + e; }
};

// The mask of a sequence's tile, as bits (attention::MaskBits): four words for each query, of which word t holds keys
// 8 j + 2 t + e.
struct StagedMaskBits {
  uint4 queries[kBiasStationaryTokens];

  // Issues the copies; the thread commits them with its others. The plan asks for bits where there is a mask.
  __device__ __forceinline__ void load(const attention::AttentionParams& p, const HeadCoord& coord) {
    const attention::MaskBits& bits = p.score_mod.mask_bits;
    const auto query = static_cast<int>(threadIdx.x);
    if (!bits.present() || query >= static_cast<int>(coord.sequence.num_queries)) return;
    const uint32_t* source = bits.data + coord.sequence.batch * bits.batch_stride + coord.head * bits.head_stride +
                             query * bits.query_stride;
    ptx::copy_async_16(ptx::shared_address(&queries[query]), source, 16);
  }

  // Whether the query may attend to key 8 j + 2 t + e is bit 2 j + e.
  __device__ __forceinline__ uint32_t word(int query, int t) const {
    return reinterpret_cast<const uint32_t*>(queries)[4 * query + t];
  }
};

}  // namespace flash_attn_ext::sm80
