// What the backward kernels are told, beside what the host tells every backend, and what they tell each other.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "attention/divisor.h"
#include "attention/params.h"
#include "kernels/plan/mask_visits.h"
#include "kernels/plan/sm90.h"
#include "kernels/plan/visit_order.h"
#include "kernels/sm90/backward/key_tile_work.h"
#include "kernels/sm90/tensor_map.h"
#include "kernels/tile_config_sm90.h"
#include "tile/sm90/column_terms.h"

namespace flash_attn_ext::sm90 {

// P is multiplied by 2^shift, and dP - delta divided by it, where P is kept in float16 for dS: its smallest normal
// number is 2^-14, and a P of many keys is smaller.
constexpr int weight_shift(HeadDims dims) { return backward_tile(dims).keys_in_registers ? 0 : 14; }

// Where products take in delta, dS stays multiplied by 2^weight_shift, up to dK and dQ: in a type that goes as far as
// float32.
template <class Element>
constexpr bool keeps_shift(bool adds_statistics) {
  return adds_statistics && std::is_same_v<Element, __nv_bfloat16>;
}

// A tile of queries, by its number in the sequence.
struct QueryTile {
  int batch;
  int head;
  int tile;
};

// Blocks by tiles of queries: tile of the longest sequence first, then head, then batch entry.
struct QueryTileGrid {
  attention::Divisor tiles;
  attention::Divisor heads;

  __device__ __forceinline__ QueryTile at(uint32_t block) const {
    const uint32_t index = tiles.quotient(block);
    const uint32_t batch = heads.quotient(index);
    return {static_cast<int>(batch), static_cast<int>(index - batch * heads.divisor),
            static_cast<int>(block - index * tiles.divisor)};
  }
};

// Where the kernels meet. Sums and statistics are laid out in tiles of queries: those of a head come one after the
// other, the heads likewise. A packed sequence begins at a tile of its own. Sums of dK and dV are laid out in tiles of
// keys in the same way.
struct BackwardWorkspace {
  static constexpr int kQueries = VisitOrder::kQueries;
  // Of each query in float32: LSE * log2(e) - shift, and delta / 2^shift. With a bias the LSE itself, delta / 2^shift,
  // and log2(e) times what rounding left out of the LSE, - shift. Where products add them, of a tile: the Terms of S,
  // -LSE / scale, and those of dP, -delta.
  static constexpr int kStatistics = plan::kBackwardStatistics;
  template <class Element>
  using Terms = tile::ColumnTerms<Element, kQueries>;

  KeyTileWork* table;  // in the order of claims
  float* dq_sums;      // of each tile, or each tile and phase: dQ / scale, in the order of accumulators
  float* statistics;   // of each tile
  int* turns;          // of each of the sums: how many visitors have added to them
  uint8_t* dq_nan_flags;
  uint8_t* dkdv_nan_flags;
  uint32_t* claims;
  float* key_sums;  // of each tile and member: dV, then dK / scale, of each part, in the order of accumulators
  int* arrivals;    // of each tile and part: how many members have left theirs
  int tiles_of_head;
  int sums_of_head;  // as many, or times the phases that have their own

  __device__ __forceinline__ static int first_tile(const attention::AttentionParams& p,
                                                   const attention::Sequence& sequence) {
    const auto batch = static_cast<int>(sequence.batch);
    if (p.sequences.cu_seqlens_q != nullptr) return static_cast<int>(sequence.query_begin) / kQueries + batch;
    return batch * VisitOrder::num_tiles(p.sequences.max_seqlen_q, kQueries);
  }
  FLASH_HOST_DEVICE static int key_tiles_of_head(const attention::AttentionParams& p) {
    const auto batch = static_cast<int>(p.batch);
    if (p.sequences.cu_seqlens_k != nullptr) return static_cast<int>(p.sequences.total_k) / VisitOrder::kKeys + batch;
    return batch * VisitOrder::num_tiles(p.sequences.max_seqlen_k, VisitOrder::kKeys);
  }
  __device__ __forceinline__ static int first_key_tile(const attention::AttentionParams& p,
                                                       const attention::Sequence& sequence) {
    const auto batch = static_cast<int>(sequence.batch);
    if (p.sequences.cu_seqlens_k != nullptr) return static_cast<int>(sequence.key_begin) / VisitOrder::kKeys + batch;
    return batch * VisitOrder::num_tiles(p.sequences.max_seqlen_k, VisitOrder::kKeys);
  }
  // A tile of queries' number.
  __device__ __forceinline__ int number_of(const attention::AttentionParams& p, const attention::Sequence& sequence,
                                           const QueryTile& at) const {
    return at.head * tiles_of_head + first_tile(p, sequence) + at.tile;
  }
  // Of a warp's 16 rows of it, in the order of a schedule of queries, one head after the other (schedule/block.cuh).
  __device__ __forceinline__ uint8_t& dq_nan_flag(const attention::AttentionParams& p, const QueryTile& at,
                                                  int warp) const {
    const int tiles = VisitOrder::num_tiles(p.sequences.max_seqlen_q, kQueries);
    const int group = static_cast<int>(p.queries_per_key_head());
    const int key_head = at.head / group;
    const int64_t pair = int64_t{key_head} * p.batch + at.batch;
    const int64_t row_of_tiles = pair * group + at.head - key_head * group;
    return dq_nan_flags[(row_of_tiles * tiles + tiles - 1 - at.tile) * 4 + warp];
  }
  __device__ __forceinline__ float* statistics_of(int64_t tile) const {
    return statistics + tile * kStatistics * kQueries;
  }
};

struct BackwardArguments {
  OperandMap q;
  OperandMap k;
  OperandMap v;
  OperandMap dout;
  OperandMap bias;
  attention::BackwardParams params;
  VisitOrder order;
  BackwardWorkspace workspace;
  float scale;
  float scale_log2e;
  float shift;           // weight_shift
  float gradient_scale;  // of dK and dQ: scale, / 2^weight_shift where keeps_shift
  bool adds_statistics;
  float lse_factor;  // -1 / scale, as scale_log2e is rounded
  MaskVisits mask;
  float kept_factor;  // Dropout kernels: what dropout multiplies by, / 2^weight_shift
};

}  // namespace flash_attn_ext::sm90
