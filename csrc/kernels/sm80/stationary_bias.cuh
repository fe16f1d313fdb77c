// What the bias-stationary kernels of both passes share: the bias of a head, which stays in shared memory, the mask of
// a sequence, which batch entries a CTA has, and which rows it repairs.
#pragma once

#include <cstdint>

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

// A head's tile of the bias in 16 bits, in the order in which the threads of a CTA hold scores: what a thread reads, it
// has written itself. It is -inf where position hides a key, so that visibility costs nothing in the loop over batch
// entries. Without a bias it is 0 elsewhere.
template <class Element, class Acc, int kThreads>
struct StationaryBias {
  static_assert(Acc::kRowTiles == 1 && Acc::kColumnTiles % 2 == 0);

  uint4 data[Acc::kColumnTiles / 2][kThreads];  // two column tiles, and two rows of each

  template <class Where>
  __device__ __forceinline__ void load(const Where& where) {
    const attention::AttentionParams& p = where.p;
    const attention::BroadcastView& bias = p.score_mod.bias;
    const auto element_at = [&](int r, int column) {
      const int64_t query = where.query(Acc::row(r), column);
      const int64_t key = where.key(Acc::row(r), column);
      const attention::Sequence& sequence = where.coord.sequence;
      const attention::Interval seen = p.visibility.keys_of(query, sequence);
      if (query >= sequence.num_queries || key < seen.begin || key >= seen.end) return -INFINITY;
      if (!bias.present()) return 0.0f;
      return static_cast<float>(
          static_cast<const Element*>(bias.data)[bias.offset({sequence.batch, where.coord.head, query, key})]);
    };
    const auto pair_at = [&](int r, int j) {
      return ptx::pack(element_at(r, Acc::column(j, 0)), element_at(r, Acc::column(j, 1)), Element{});
    };
#pragma unroll 1
    for (int j = 0; j < Acc::kColumnTiles; j += 2) {
      data[j / 2][threadIdx.x] = {pair_at(0, j), pair_at(1, j), pair_at(0, j + 1), pair_at(1, j + 1)};
    }
  }

  // Calls function(r, j, low, high) with each of the thread's pairs.
  template <class Function>
  __device__ __forceinline__ void for_each_pair(Function&& function) const {
#pragma unroll
    for (int j = 0; j < Acc::kColumnTiles; j += 2) {
      const uint4 words = data[j / 2][threadIdx.x];
      call(function, 0, j, words.x);
      call(function, 1, j, words.y);
      call(function, 0, j + 1, words.z);
      call(function, 1, j + 1, words.w);
    }
  }

 private:
  template <class Function>
  __device__ __forceinline__ static void call(Function&& function, int r, int j, uint32_t pair) {
    function(r, j, ptx::to_float(static_cast<uint16_t>(pair), Element{}),
             ptx::to_float(static_cast<uint16_t>(pair >> 16), Element{}));
  }
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
