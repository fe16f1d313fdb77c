// The arguments of the key-stationary backward kernels, beside what the host passes to every backend, the workspace
// through which the kernels exchange data, and the launches that list the work in it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

#include "attention/division.h"
#include "attention/key_bias.h"
#include "attention/params.h"
#include "attention/sequence.h"
#include "kernels/common/repair/repair.h"
#include "kernels/config/key_stationary.h"
#include "kernels/plan/sm90/sm90.h"
#include "kernels/schedule/existing_tiles.h"
#include "kernels/schedule/head_tiles.h"
#include "kernels/schedule/key_tile_parts.h"
#include "kernels/schedule/loop_order.h"
#include "kernels/schedule/mask_iterations.h"
#include "kernels/schedule/query_chunks.h"
#include "kernels/sm90/tensor_map.h"
#include "tile/sm90/augmented_columns.h"

namespace flash_attn_ext::sm90 {

// An entry of the table that list_key_tiles writes. It has 32-bit numbers, because the threads that
// read it have few registers.
struct alignas(16) KeyTileWork {
  static constexpr int kEnd = -1;

  int batch;  // kEnd: there are no more work tiles
  int key_head;
  int heads;           // query heads of the share of the KV group
  int kv_group_share;  // the index of that share
  int phase_end;       // cyclic: the CTA fetches no other tile before all below this index are fetched
  int begin;           // the query tiles over which it iterates
  int end;
  int first;        // the first one of its loop
  int query_begin;  // of the sequence
  int key_begin;
  int first_accumulator;  // of the sequence's first query tile: its index in a head
  int iterations;         // over all of its heads
  int index;              // the key tile's index among those of all key heads
  LoopOrder::Contributor contributor;
  // The query tiles that see a warpgroup's keys, of those from begin on to end. Where there are none, end may be less
  // than begin.
  TileRange own[LoopOrder::kKeyWarpgroups];

  FLASH_HOST_DEVICE attention::Sequence sequence() const {
    return {batch, query_begin, key_begin, contributor.num_queries, contributor.num_keys};
  }
  // The first query head of the share. group: query heads of the KV group, all of which a cyclic share has.
  FLASH_HOST_DEVICE int first_head(int group) const {
    return key_head * group + (contributor.direction == LoopDirection::kCyclic ? 0 : kv_group_share * heads);
  }
};

static_assert(sizeof(KeyTileWork) == LoopOrder::kWorkBytes);

// The same where a launch has a query chunk. In cyclic order, query tiles are numbered as if the chunk were the
// sequence.
struct ChunkedKeyTileWork : KeyTileWork {
  // What becomes of dK and dV when the key tile has iterated.
  enum class Gradients : int {
    kNone,     // there are none in this chunk
    kPartial,  // they are stored as partial sums, for the next chunk
    kWritten,
  };

  int first_query_tile;   // the one of the sequence that has index 0
  int partial_sums;       // the index of the key tile's partial dK and dV
  bool has_partial_sums;  // they hold those of earlier chunks
  Gradients gradients;
};

static_assert(sizeof(ChunkedKeyTileWork) == QueryChunks::kWorkBytes);

// A KeyTileWork where there is a mask. It may be one part of a key tile and share (KeyTileParts). The partial sums are
// those of all parts and shares of the key tile.
struct MaskedKeyTileWork : KeyTileWork {
  int first_iteration;  // of those that the key tile and share have
  int partial_sums;     // the index of the first partial dK and dV of the key tile
  int arrivals;         // the index of its counter of partial sums that are stored
  uint16_t partial;     // the index of the work tile's among these
  uint16_t partials;    // 1: there are no partial sums
};

static_assert(sizeof(MaskedKeyTileWork) == KeyTileParts::kWorkBytes);

// Where P is kept in float16 for dS, it is multiplied by 2^shift, and dP - delta is divided by it. Otherwise P of many
// keys would be smaller than float16's smallest normal number, which is 2^-14.
constexpr int weight_shift(const KeyStationaryConfig& config) { return config.tile.keys_in_registers ? 0 : 14; }

// Where the GEMMs add delta, dS stays multiplied by 2^weight_shift up to dK and dQ. So this needs an element type with
// the range of float32.
template <class Element>
constexpr bool keeps_shift(bool adds_statistics) {
  return adds_statistics && std::is_same_v<Element, __nv_bfloat16>;
}

// The number that is subtracted from a head's key bias and from the LSEs of its queries, since the difference of two
// large numbers would be inexact. It is the LSE of the first query: all queries see the same keys, so their LSEs differ
// no more than their products with keys do. Beyond kMostScore, scores had lost digits in the forward pass. The
// reference is NaN then, and also where the first LSE is, and so are the head's gradients, which are computed again
// (common/repair).
//
// Except where the first LSE is the bias of the first or the last key, and dominates q.k. The forward pass has then
// weighed keys by their bias only, and so does this pass: S is ignored, and the LSE of a query is this number and a
// residual that is the same for all queries.
struct KeyBiasReference {
  float value;
  bool is_dominant;

  // num_keys: those that the head's bias has.
  template <class Element>
  __device__ __forceinline__ static KeyBiasReference of(const attention::BackwardParams& p, int64_t batch, int64_t head,
                                                        int64_t first_query, int64_t num_keys) {
    const float lse = *p.lse.at<const float>(batch, head, first_query);
    if (lse == -INFINITY) return {0.0f, false};
    if (fabsf(lse) <= attention::kMostScore) return {lse, false};
    // A sequence without keys has the LSE of its sink, and no bias to read.
    const bool is_dominant = fabsf(lse) >= attention::kLeastDominant && fabsf(lse) < INFINITY && num_keys > 0 &&
                             is_of_an_end<Element>(p, batch, head, num_keys, lse);
    return {is_dominant ? lse : NAN, is_dominant};
  }

  // An LSE, less the reference.
  __device__ __forceinline__ float subtract_from(float lse) const {
    return is_dominant && lse != -INFINITY ? 0.0f : lse - value;
  }

 private:
  template <class Element>
  __device__ __forceinline__ static bool is_of_an_end(const attention::BackwardParams& p, int64_t batch, int64_t head,
                                                      int64_t num_keys, float lse) {
    const attention::BroadcastView& bias = p.score_mod.bias;
    const auto* const row = static_cast<const Element*>(bias.data) + bias.offset({batch, head, 0, 0});
    return static_cast<float>(row[0]) == lse || static_cast<float>(row[num_keys - 1]) == lse;
  }
};

// A query tile, by its index in the sequence.
struct QueryTile {
  int batch;
  int head;
  int tile;
};

// The query tiles of a grid. The tile varies fastest, then the head, then the batch entry. Each head has the tiles of
// the longest sequence.
struct QueryTileGrid {
  attention::Divisor tiles;
  attention::Divisor heads;
  uint32_t blocks;  // one for each query tile

  __device__ __forceinline__ QueryTile at(uint32_t block) const {
    const uint32_t index = tiles.quotient(block);
    const uint32_t batch = heads.quotient(index);
    return {static_cast<int>(batch), static_cast<int>(index - batch * heads.divisor),
            static_cast<int>(block - index * tiles.divisor)};
  }
};

// Memory that the kernels share. Accumulators of dQ and statistics are laid out in query tiles: those of a head are
// consecutive, and so are the heads. A packed sequence begins at a tile of its own. Partial dK and dV are laid out in
// key tiles in the same way.
struct KeyStationaryWorkspace {
  static constexpr int kQueries = LoopOrder::kQueries;
  // Statistics of each query in float32: LSE * log2(e) - shift, and delta / 2^shift. With a bias they are the LSE
  // itself, delta / 2^shift, and log2(e) * (what rounding left out of the LSE) - shift. Where the GEMMs add them, a
  // tile has augmented columns instead: -LSE / scale for S, and -delta for dP.
  static constexpr int kStatistics = plan::kKeyStationaryStatistics;
  template <class Element>
  using AugmentedColumns = tile::AugmentedColumns<Element, kQueries>;

  // Of KeyTileWork, ChunkedKeyTileWork or MaskedKeyTileWork, in the order in which CTAs fetch work tiles.
  void* table;
  float* dq_sums;           // accumulators of each query tile, in split-KV of each phase: dQ / scale, in register order
  float* statistics;        // of each query tile
  float* later_statistics;  // the same for later keys, with ALiBi where queries see such keys; or null
  int* dq_semaphores;       // of each accumulator: how many contributors have added to it
  uint8_t* dq_nan_flags;
  uint8_t* dkdv_nan_flags;
  uint32_t* work_counter;
  // Of each key tile, share and warpgroup: partial dV, then dK / scale, in register order. Those of parts of key tiles
  // (KeyTileParts) follow them.
  float* key_sums;
  // Of each key tile and warpgroup: how many shares have stored their partial dK and dV. The counters of
  // key tiles with parts follow them.
  int* arrivals;
  int tiles_of_head;
  int accumulators_of_head;  // of dQ: as many, in split-KV times the phases

  __device__ __forceinline__ static int first_tile(const attention::AttentionParams& p,
                                                   const attention::Sequence& sequence) {
    const auto batch = static_cast<int>(sequence.batch);
    if (p.sequences.cu_seqlens_q != nullptr) return static_cast<int>(sequence.query_begin) / kQueries + batch;
    return batch * LoopOrder::num_tiles(p.sequences.max_seqlen_q, kQueries);
  }
  FLASH_HOST_DEVICE static int key_tiles_of_head(const attention::AttentionParams& p) {
    const auto batch = static_cast<int>(p.batch);
    if (p.sequences.cu_seqlens_k != nullptr) return static_cast<int>(p.sequences.total_k) / LoopOrder::kKeys + batch;
    return batch * LoopOrder::num_tiles(p.sequences.max_seqlen_k, LoopOrder::kKeys);
  }
  __device__ __forceinline__ static int first_key_tile(const attention::AttentionParams& p,
                                                       const attention::Sequence& sequence) {
    const auto batch = static_cast<int>(sequence.batch);
    if (p.sequences.cu_seqlens_k != nullptr) return static_cast<int>(sequence.key_begin) / LoopOrder::kKeys + batch;
    return batch * LoopOrder::num_tiles(p.sequences.max_seqlen_k, LoopOrder::kKeys);
  }
  // The index of a query tile in the workspace.
  __device__ __forceinline__ int index_of(const attention::AttentionParams& p, const attention::Sequence& sequence,
                                          const QueryTile& at) const {
    return at.head * tiles_of_head + first_tile(p, sequence) + at.tile;
  }
  // The flag of a warp's 16 rows of a query tile.
  __device__ __forceinline__ uint8_t& dq_nan_flag(const attention::AttentionParams& p, const QueryTile& at,
                                                  int warp) const {
    const int tiles = LoopOrder::num_tiles(p.sequences.max_seqlen_q, kQueries);
    const int group = static_cast<int>(p.queries_per_key_head());
    const int key_head = at.head / group;
    const int64_t pair = int64_t{key_head} * p.batch + at.batch;
    const int64_t head = pair * group + at.head - key_head * group;
    return dq_nan_flags[common::query_flag_index(head, tiles, at.tile) * 4 + warp];
  }
  __device__ __forceinline__ float* statistics_of(int64_t tile) const {
    return statistics + tile * kStatistics * kQueries;
  }
  __device__ __forceinline__ float* later_statistics_of(int64_t tile) const {
    return later_statistics + tile * kStatistics * kQueries;
  }
};

struct KeyStationaryArguments {
  TmaDescriptor q;
  TmaDescriptor k;
  TmaDescriptor v;
  TmaDescriptor dout;
  BiasDescriptor bias;
  attention::BackwardParams params;
  LoopOrder order;
  KeyStationaryWorkspace workspace;
  float scale;
  float scale_log2e;
  float shift;           // weight_shift
  float gradient_scale;  // of dK and dQ: scale, divided by 2^weight_shift where keeps_shift
  bool adds_statistics;
  // Kernels with a softcap neither add statistics nor drop. Sharing places leaves other kernels' arguments where they
  // were.
  union {
    float lse_factor;  // -1 / scale, from scale_log2e as it is rounded
    float cap_factor;  // with a softcap: 2 * scale / softcap * log2(e)
  };
  MaskIterations mask;
  union {
    float kept_factor;  // with dropout: 1 / (1 - p), divided by 2^weight_shift
    float cap_log2e;    // with a softcap: it times log2(e)
  };
  const int32_t* keys_before_padding;  // of each batch entry, before those that a key bias hides at its end; or null
  ExistingTiles existing_tiles;
  // Where kernels sum dS (KeyStationaryConfig::sums_dscores):
  attention::KeyBiasMaxima key_bias_maxima;
  float* dscore_sums;    // of each pair, key tile and key
  bool has_exact_delta;  // params.delta holds it (backward/exact_delta)

  // A batch entry, without the keys that a key bias hides at its end. count_keys_before_padding has zeroed the
  // gradients of these.
  __device__ __forceinline__ attention::Sequence sequence(int64_t batch) const {
    attention::Sequence sequence = params.sequences.at(batch);
    if (keys_before_padding != nullptr) sequence.num_keys = keys_before_padding[batch];
    return sequence;
  }
  FLASH_HOST_DEVICE uint32_t num_work_tiles() const { return existing_tiles.most(order.num_work_tiles()); }
};

// Arguments of the kernels for query chunks. `order` has the pairs of the launch only.
struct ChunkedKeyStationaryArguments : KeyStationaryArguments {
  QueryChunks chunks;
  LoopOrder::KeyTiles key_tiles;  // that take part in the launch
  uint32_t first_pair;            // of the launch
  int launch;                     // its index among those of the same pairs
  bool is_first;                  // of all launches of the call

  FLASH_HOST_DEVICE uint32_t num_work_tiles() const { return order.num_work_tiles(order.pairs, key_tiles); }
};

// Launches the kernel that writes args.workspace.table, and clears the counters that CTAs of the backward kernel share.
cudaError_t list_key_tiles(const KeyStationaryArguments& args, cudaStream_t stream);
cudaError_t list_key_tiles(const ChunkedKeyStationaryArguments& args, cudaStream_t stream);

// How many entries the table has where there is a mask.
FLASH_HOST_DEVICE uint32_t num_masked_work_tiles(const KeyStationaryArguments& args) {
  return KeyTileParts::table_entries(args.order.num_work_tiles(), args.mask.part_sums);
}

// Launches the kernels that write args.mask. It launches nothing where there is no mask.
cudaError_t list_mask_iterations(const KeyStationaryArguments& args, cudaStream_t stream);

// Launches the kernel that divides long key tiles into parts, before list_key_tiles. It launches nothing where there is
// no room for parts.
cudaError_t divide_key_tiles(const KeyStationaryArguments& args, int64_t ctas, cudaStream_t stream);

}  // namespace flash_attn_ext::sm90
