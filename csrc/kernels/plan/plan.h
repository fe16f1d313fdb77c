// One plan for each call: which kernels run, and with what. It is decided before anything is allocated or launched, by
// pure host code without torch or the CUDA runtime. Dispatch switches on a plan and decides nothing again. explain()
// prints it in words.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "attention/division.h"
#include "attention/params.h"
#include "kernels/config/sm80.h"
#include "kernels/plan/interface.h"
#include "kernels/schedule/loop_order.h"
#include "kernels/schedule/query_chunks.h"

namespace flash_attn_ext::plan {

// A part of the call's one allocation.
struct WorkspacePart {
  int64_t offset = 0;
  int64_t bytes = 0;

  bool present() const { return bytes > 0; }
  template <class T>
  T* in(void* workspace) const {
    return present() ? reinterpret_cast<T*>(static_cast<char*>(workspace) + offset) : nullptr;
  }
  // A statistic of each row, in the order of another one.
  attention::StatisticView like(const attention::StatisticView& other, void* workspace) const {
    return {in<void>(workspace), other.batch_stride, other.head_stride};
  }
};

// How rows with a NaN from tensor cores are repaired. They are recomputed without tensor cores (docs/numerics.md),
// because the NaN may be 0 times a value that no query attends.
enum class NanRepair {
  kNone,       // the kernel needs no repair
  kInKernel,   // the kernel recomputes such rows: where another launch would be a large part of the call
  kOwnLaunch,  // the kernel sets non-finite flags, which a repair kernel reads
};

enum class ForwardKernel {
  kCpu,
  kRows,             // float64: one warp per row, without tensor cores
  kStreaming,        // one CTA per query tile; key tiles stream past it
  kWholeHeads,       // persistent CTAs compute head after head, with all keys of a head at once
  kBiasStationary,   // persistent CTAs compute one short sequence after the other; the bias of a head stays
  kShortBias,        // one CTA per short head with a bias, with all keys of the head; on Hopper
  kSplit,            // few queries, or keys from a cache: persistent CTAs have stream-K ranges of all heads' keys
  kWarpSpecialised,  // Hopper: persistent CTAs fetch query tiles; one warpgroup is the producer, the others compute
  kSingleTile,       // the same, where one tile holds all keys of a sequence
};

struct ForwardPlan {
  ForwardKernel kernel = ForwardKernel::kCpu;
  int64_t keys_per_split = 0;  // kCpu: keys of a split where threads share a query tile; 0: they do not
  bool tf32 = false;           // operands of float32 GEMMs are rounded to TF32
  int head_dim = 0;            // that the kernel is compiled for
  int head_dim_v = 0;          // kWarpSpecialised, kSingleTile; elsewhere 0, and v has head_dim
  ScoreMode score = ScoreMode::kGeneric;
  bool row_max = false;  // the call wants ForwardParams::row_max, which the kernel writes
  // The row of the table of the kernel: sm80::kForwardConfigs (kStreaming), sm80::kSplitConfigs (kSplit),
  // sm80::kBiasStationaryConfigs (kBiasStationary), sm90::kForwardConfigs (kWarpSpecialised) or
  // sm90::kSingleTileConfigs (kSingleTile).
  int row = 0;
  TileShape tile{};  // kStreaming, kBiasStationary, kShortBias, kSplit, kWarpSpecialised, kSingleTile
  NanRepair nan_repair = NanRepair::kNone;
  // kWarpSpecialised: how many times smaller than the last L2 head group the others are.
  int64_t smaller_head_groups = 1;
  int64_t uneven_heads = 1;       // kWarpSpecialised: for how many heads the last tiles are scheduled last
  int64_t l2_bytes = 0;           // L2 heads that are worked on together share it
  int64_t persistent_ctas = 0;    // kWholeHeads, kSplit, kWarpSpecialised, kSingleTile
  int combine_warps = 1;          // kSplit: warps that combine a row's splits; if several, the row has a CTA of its own
  bool combine_warms_up = false;  // kSplit: combine CTAs execute their instructions once before they wait for splits
  int64_t append_ctas = 0;        // kSplit: more CTAs, which append new keys to the cache; 0: an earlier kernel does
  int64_t kv_splits = 1;          // kWarpSpecialised: CTAs that share the keys of a query tile
  uint32_t existing_tiles = 0;    // kWarpSpecialised: entries of the list of ExistingTiles; 0: there is none
  // kWarpSpecialised, with a mask that hides keys: the plan without a mask, for batch entries of which the mask leaves
  // one interval (KeyIntervals). This plan is for the others.
  std::shared_ptr<const ForwardPlan> of_intervals;

  bool is_warp_specialised() const {
    return kernel == ForwardKernel::kWarpSpecialised || kernel == ForwardKernel::kSingleTile;
  }

  struct Workspace {
    int64_t bytes = 0;
    WorkspacePart mask_tiles;      // flags of each tile of a boolean mask
    WorkspacePart nan_flags;       // one byte per warp
    WorkspacePart mask_bits;       // kWarpSpecialised, kBiasStationary: a boolean mask, packed
    WorkspacePart tile_list;       // kWarpSpecialised: which tiles a CTA has computed
    WorkspacePart split_rows;      // kSplit, kWarpSpecialised: partial O of the rows of splits
    WorkspacePart split_states;    // kSplit, kWarpSpecialised: their row maxima and sums
    WorkspacePart split_list;      // kSplit: which splits a tile of rows has
    WorkspacePart intervals;       // of keys, which a mask leaves of each batch entry
    WorkspacePart of_intervals;    // the workspace of the plan for these
    WorkspacePart bias_boxes;      // kWarpSpecialised: RelativeBiasBoxes
    WorkspacePart bias_maxima;     // kWarpSpecialised: attention::KeyBiasMaxima
    WorkspacePart mask_as_bias;    // kWarpSpecialised: the key bias that stands for a mask (attention/key_bias.h)
    WorkspacePart aligned_bias;    // kWarpSpecialised, kShortBias: a copy of the bias (attention/aligned_bias.h)
    WorkspacePart existing_tiles;  // kWarpSpecialised: ExistingTiles
  } workspace;
};

enum class BackwardKernels {
  kCpu,
  kRows,               // float64: as in the forward pass
  kFused,              // one kernel for dQ, dK and dV: five GEMMs per tile
  kBiasStationary,     // the same and dBias, for one short sequence after the other; the bias of a head stays
  kShortBias,          // one kernel for dQ, dK and dV of short heads with a bias; on Hopper
  kRecompute,          // dQ, then dK and dV; each computes the scores: seven GEMMs per tile
  kMaterialiseInDkdv,  // dK and dV first, which materialise dS; dQ = dS K: five GEMMs per tile
  kMaterialiseInDq,    // dQ first, which materialises P and dS; dV = P^T dO and dK = dS^T Q
  kKeyStationary,      // Hopper: persistent CTAs fetch key tiles and add to dQ in a fixed order: five GEMMs per tile
  // Hopper: the order of kMaterialiseInDq, in warp-specialised kernels
  kTwoPass,
  // Hopper: few queries stay in a persistent CTA, and key tiles stream past; partial dQ are summed afterwards
  kQueryStationary,
};

enum class DeltaSource {
  kNone,          // there is nothing to do
  kOwnKernel,     // rowsum(dout * out) - dlse, before all other kernels
  kSharedKernel,  // the same, in the dQ or the fused kernel; on Hopper in the one that prepares statistics
  kExactKernel,   // rowsum(P dP) - dlse, in which out is not rounded to the element type
};

enum class BiasGradientSource {
  kNone,
  kRowSums,            // of dS, without dS (attention/dscore_row_sums.h); their kernel also subtracts dlse from delta
  kSameDscores,        // the dS that dQ, dK and dV are computed from, at the same time
  kMaterialised,       // materialised dS
  kKeySums,            // sums over queries of the dS that dQ, dK and dV are computed from (kKeyStationary)
  kRecomputed,         // recomputed dS
  kOverBatch,          // recomputed dS of all batch entries, which share the bias, tile by tile
  kRelative,           // recomputed dS of a relative-position bias, summed along diagonals
  kRelativeOverBatch,  // the same with the tiles of kOverBatch
};

struct BackwardPlan {
  BackwardKernels kernels = BackwardKernels::kCpu;
  DeltaSource delta = DeltaSource::kNone;
  BiasGradientSource dbias = BiasGradientSource::kNone;
  // Whether the exact delta replaces delta after dQ, dK and dV, for the sums of recomputed dS that come next.
  bool exact_delta_of_sums = false;
  // Whether each element of dBias is written once, in the bias's own type. Otherwise it is added to zeros of the
  // accumulate type.
  bool writes_dbias_once = false;
  bool tf32 = false;
  int dq_head_dim = 0;  // that the kernels are compiled for
  int dkdv_head_dim = 0;
  int head_dim_v = 0;       // kTwoPass; elsewhere 0, and v has the head dim of the others
  int dscore_head_dim = 0;  // of the kernels that recompute dS
  ScoreMode dq_score = ScoreMode::kGeneric;
  ScoreMode dkdv_score = ScoreMode::kGeneric;
  int dq_row = 0;     // of sm80::kDqConfigs
  int dkdv_row = 0;   // of sm80::kDkdvConfigs
  int fused_row = 0;  // of sm80::kFusedConfigs
  // Of sm80::kBiasStationaryConfigs (kBiasStationary), sm90::kKeyStationaryConfigs (kKeyStationary),
  // sm90::kTwoPassConfigs or sm90::kQueryStationaryConfigs.
  int row = 0;
  LoopOrder order;                // kKeyStationary; its head dim is dkdv_head_dim
  QueryChunks query_chunks;       // kKeyStationary
  uint32_t existing_tiles = 0;    // kKeyStationary: entries of the list of ExistingTiles; 0: there is none
  uint32_t pairs_per_launch = 0;  // kKeyStationary with query chunks: pairs of `order`
  // kKeyStationary with a mask: for how many parts of key tiles there is room (schedule/key_tile_parts.h).
  int part_sums = 0;
  int64_t persistent_ctas = 0;
  int64_t query_tiles_of_head = 0;  // in all sequences
  NanRepair nan_repair = NanRepair::kNone;
  int64_t l2_bytes = 0;

  struct Materialised {
    int64_t rows = 0;
    int64_t columns = 0;
    int64_t bytes_of_matrices = 0;  // of the matrices of P of one launch; those of dS have the same size
    int64_t pairs_per_launch = 0;
    int64_t launches = 0;
    // kTwoPass: the query chunks of a pair, each with a launch of its own, or one for each of its key chunks. Empty:
    // pairs are not divided into chunks.
    struct QueryChunk {
      int end;              // in query tiles
      int key_chunk_tiles;  // key tiles of a key chunk; 0: the chunk is not divided into key chunks
    };
    std::vector<QueryChunk> chunks;
    int64_t rows_with_key_chunks = 0;  // the most query tiles of a launch of a key chunk, of all heads
    int64_t key_tiles_of_matrix = 0;   // with query chunks: those that hand on partial dK and dV
  } materialised;

  int64_t dq_splits = 1;  // CTAs that share the keys of a query tile in the kernel that computes dQ

  int64_t dbias_splits = 1;  // kOverBatch, kRelative, kRelativeOverBatch: CTAs that share the batch entries of a tile

  int64_t alibi_partials_per_head = 0;
  // Of sm90::kExactDeltaConfigs. kNoExactDelta: no kernel of Hopper's computes the exact delta.
  static constexpr int kNoExactDelta = -1;
  int exact_delta_row = kNoExactDelta;

  struct Workspace {
    int64_t bytes = 0;
    WorkspacePart delta;
    WorkspacePart materialised_scores;
    WorkspacePart mask_tiles;
    // kBiasStationary, kQueryStationary, kTwoPass: a boolean mask, packed. kKeyStationary: MaskIterations, of intervals
    // and blocks too.
    WorkspacePart mask_bits;
    WorkspacePart alibi_partials;
    // Partial dBias of each CTA (kBiasStationary), split of the batch entries (kOverBatch), or block
    // diagonal and split (kRelative, kRelativeOverBatch).
    WorkspacePart dbias_partials;
    WorkspacePart dq_nan_flags;  // one byte per warp of a launch
    WorkspacePart dkdv_nan_flags;
    // Partial dQ in float32: for each of the dq_splits, rows of common::dq_partial_columns(). kQueryStationary has one
    // for each split of its work list (WorkListShares::split_index).
    WorkspacePart dq_partials;
    // is_warp_specialised(): float32 accumulators of dQ, statistics of queries, semaphores of dQ, the list of key
    // tiles, work counters.
    WorkspacePart dq_sums;
    WorkspacePart statistics;
    WorkspacePart later_statistics;
    WorkspacePart dq_semaphores;
    WorkspacePart key_tiles;
    WorkspacePart work_counter;
    // Partial dK and dV: of shares of a KV group, of earlier query chunks, or of both. With a mask also of parts of key
    // tiles.
    WorkspacePart key_sums;
    WorkspacePart query_sums;  // partial dQ of key chunks
    WorkspacePart arrivals;
    WorkspacePart bias_boxes;           // kKeyStationary, kTwoPass: as in the forward pass
    WorkspacePart mask_as_bias;         // kKeyStationary: as in the forward pass
    WorkspacePart aligned_bias;         // kKeyStationary, kTwoPass, kShortBias: as in the forward pass
    WorkspacePart float32_bias;         // kKeySums: a copy of a key bias (attention/key_bias.h)
    WorkspacePart bias_maxima;          // kKeySums: attention::KeyBiasMaxima, running
    WorkspacePart exact_delta_counter;  // with exact_delta_row: of its work tiles
    WorkspacePart dscore_sums;          // kKeySums: of each pair and share, and each key of the key tiles
    WorkspacePart keys_before_padding;  // kKeyStationary: of batch entries, where a key bias may hide keys at the end
    WorkspacePart existing_tiles;       // kKeyStationary: as in the forward pass
    WorkspacePart unwanted_gradient;    // is_warp_specialised(): attention/unwanted_gradients.h
  } workspace;

  // Whether dBias comes from kernels that run after those of dQ, dK and dV, which then must not see it. (Those beside
  // kOverBatch ignore it.)
  bool recomputes_dbias() const {
    return dbias == BiasGradientSource::kRecomputed || dbias == BiasGradientSource::kRelative ||
           dbias == BiasGradientSource::kRelativeOverBatch;
  }
  bool is_warp_specialised() const {
    return kernels == BackwardKernels::kKeyStationary || kernels == BackwardKernels::kTwoPass ||
           kernels == BackwardKernels::kQueryStationary;
  }
};

// Formats a plan as text, for people and profiles: "fused (portable, tile 32 x 128); delta within another kernel;
// workspace 256 bytes (delta 256)".
std::string describe(const ForwardPlan& plan);
std::string describe(const BackwardPlan& plan);
std::string describe(const TangentPlan& plan);  // the plan has a kernel

// The plans of each backend, whether or not it was built: a plan needs no GPU. Of pointers they look at whether a
// tensor is there and how it is aligned, never at what it holds.
ForwardPlan plan_forward_cpu(const attention::ForwardParams& params, const Limits& limits);
BackwardPlan plan_backward_cpu(const attention::BackwardParams& params, const Limits& limits);
ForwardPlan plan_forward_sm80(const attention::ForwardParams& params, const Limits& limits);
BackwardPlan plan_backward_sm80(const attention::BackwardParams& params, const Limits& limits);
ForwardPlan plan_forward_sm90(const attention::ForwardParams& params, const Limits& limits);
BackwardPlan plan_backward_sm90(const attention::BackwardParams& params, const Limits& limits);
// The plan of forward mode, on any GPU backend.
TangentPlan plan_tangents(const attention::TangentParams& params, const Limits& limits);

// Appends a part of `bytes`. total: the bytes of all parts so far.
inline WorkspacePart append(int64_t& total, int64_t bytes) {
  constexpr int64_t kAlignment = 256;  // that of cudaMalloc, so that kernels may read parts in vectors of any width
  const WorkspacePart part = {total, bytes};
  total += attention::ceil_div(bytes, kAlignment) * kAlignment;
  return part;
}

// Whether dBias sums whole rows of dS only. It then needs no dS (attention/dscore_row_sums.h).
inline bool dbias_is_row_sums(const attention::BackwardParams& p) { return p.dbias.present() && !p.dbias.per_key; }

// Whether dBias sums columns of dS.
inline bool dbias_is_column_sums(const attention::BackwardParams& p) {
  return p.dbias.present() && p.dbias.per_key && !p.dbias.per_query;
}

// Whether dBias is more precise than out. dQ and dK of such a call are as exact, whatever dimensions the bias is
// broadcast along.
inline bool has_precise_dbias(const attention::BackwardParams& p) {
  return p.dbias.present() && p.score_mod.bias.element == attention::ElementType::kFloat32;
}

}  // namespace flash_attn_ext::plan
