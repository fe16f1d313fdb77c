// ONE plan a call: which kernels run and with what, decided before anything is allocated or launched. Pure host code:
// no torch, no CUDA runtime. Dispatch switches on a plan and decides nothing again; explain() says it in words.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "attention/params.h"
#include "kernels/plan/visit_order.h"
#include "kernels/tile_config.h"
#include "kernels/tile_config_split.h"

namespace flash_attn_ext::plan {

// What a plan may count on.
struct Limits {
  int64_t max_stored_bytes = 0;  // of scores and masks that kernels keep for others (FLASH_ATTN_EXT_WORKSPACE_MIB)
  int64_t l2_bytes = 0;
  int64_t multiprocessors = 0;
};

// A part of the call's one allocation.
struct WorkspacePart {
  int64_t offset = 0;
  int64_t bytes = 0;

  bool present() const { return bytes > 0; }
  template <class T>
  T* in(void* workspace) const {
    return present() ? reinterpret_cast<T*>(static_cast<char*>(workspace) + offset) : nullptr;
  }
};

// Rows in which tensor cores met a NaN are computed again without them (docs/numerics.md): it may be 0 times what
// nobody attends.
enum class NanRepair {
  kNone,       // the kernel keeps to the rule by itself
  kInKernel,   // the kernel computes such rows again: where another launch would be a large part of the call
  kOwnLaunch,  // the kernel notes them in flags, which a repair kernel reads
};

enum class ForwardKernel {
  kCpu,
  kRows,             // float64: one warp per row, without tensor cores
  kStreaming,        // one block per tile of queries; tiles of keys stream past it
  kWholeHeads,       // resident blocks go from head to head, all of whose keys are there at once
  kSplit,            // few queries, or keys from a cache: resident blocks share the keys of all heads out among them
  kWarpSpecialised,  // Hopper: resident blocks claim tiles of queries; one warpgroup copies, the others compute
};

struct ForwardPlan {
  ForwardKernel kernel = ForwardKernel::kCpu;
  int64_t keys_per_part = 0;  // kCpu: threads share a tile of queries, each with parts of as many keys; 0: they do not
  bool tf32 = false;          // products of float32 are rounded to TF32
  int head_dim = 0;           // that the kernel is compiled for
  int head_dim_v = 0;         // kWarpSpecialised; elsewhere the same
  Variant variant = Variant::kExtended;
  sm80::QueryStationaryTile tile{};                           // kStreaming, kSplit, kWarpSpecialised
  sm80::SplitKind split_kind = sm80::SplitKind::kExtended64;  // kSplit, which has no variant
  NanRepair nan_repair = NanRepair::kNone;
  int64_t l2_bytes = 0;         // heads that are worked on together share it
  int64_t resident_blocks = 0;  // kWholeHeads, kSplit, kWarpSpecialised
  int joining_warps = 1;        // kSplit: that join the parts of a row, of which a block has one if they are several
  bool join_rehearses = false;  // kSplit: what joins them goes through its instructions before it waits for parts
  int64_t append_blocks = 0;    // kSplit: more blocks, which put new keys into the cache; 0: a kernel before it does so
  int64_t key_parts = 1;        // kWarpSpecialised: blocks that share the keys of a tile of queries
  // kWarpSpecialised, of a mask that hides keys: the plan without one, for batch entries of which it leaves one
  // interval (KeyIntervals). This plan is for the others.
  std::shared_ptr<const ForwardPlan> of_intervals;

  struct Workspace {
    int64_t bytes = 0;
    WorkspacePart mask_tiles;    // what each tile of a boolean mask holds
    WorkspacePart nan_flags;     // one byte per warp
    WorkspacePart mask_bits;     // kWarpSpecialised: a boolean mask, packed
    WorkspacePart tile_list;     // kWarpSpecialised: which tiles a block had
    WorkspacePart part_rows;     // kSplit, kWarpSpecialised: O of the parts of rows
    WorkspacePart part_states;   // likewise: their maxima and sums
    WorkspacePart part_list;     // kSplit: which parts a tile of rows has
    WorkspacePart intervals;     // that a mask leaves of each batch entry's keys
    WorkspacePart of_intervals;  // what the plan for these has
  } workspace;
};

enum class BackwardKernels {
  kCpu,
  kRows,             // float64: as in the forward pass
  kFused,            // one kernel for dQ, dK and dV: five products of tiles
  kRecompute,        // dQ, then dK and dV; each computes the scores: seven products
  kStoreInDkdv,      // dK and dV first, which store dS; dQ = dS K: five products
  kStoreInDq,        // dQ first, which stores P and dS; dV = P^T dO and dK = dS^T Q
  kWarpSpecialised,  // Hopper: resident blocks claim tiles of keys and add to dQ in a fixed order: five products
  // Hopper: the same division of work inside a block, in the order of kStoreInDq
  kWarpSpecialisedStoring,
  // Hopper: few queries stay in a resident block, and tiles of keys stream past; dQ is added up afterwards
  kWarpSpecialisedFewQueries,
};

enum class DeltaSource {
  kNone,         // there is nothing to do
  kOwnKernel,    // rowsum(dout * out) - dlse, before all others
  kFirstKernel,  // the same, in the dQ or the fused kernel
  kExactKernel,  // rowsum(P dP) - dlse: before out was rounded to the element type
};

enum class BiasGradientSource {
  kNone,
  kRowSums,      // of dS, known without it (attention/dscore_row_sums.h); delta comes without dlse and leaves with it
  kSameDscores,  // the dS of dQ, dK and dV, while it is at hand
  kStored,       // the stored dS
  kRecomputed,   // dS computed again
};

struct BackwardPlan {
  BackwardKernels kernels = BackwardKernels::kCpu;
  DeltaSource delta = DeltaSource::kNone;
  BiasGradientSource dbias = BiasGradientSource::kNone;
  // Each element of dBias is written once, in the bias's own type; else it is added to zeros of the accumulate type.
  bool writes_dbias_once = false;
  bool tf32 = false;
  int dq_head_dim = 0;  // that the kernels are compiled for
  int dkdv_head_dim = 0;
  int head_dim_v = 0;       // kWarpSpecialisedStoring; elsewhere the same
  int dscore_head_dim = 0;  // of the kernels that compute dS again
  Variant dq_variant = Variant::kExtended;
  Variant dkdv_variant = Variant::kExtended;
  int fused_keys = 0;             // of the fused kernel's tile
  VisitOrder order;               // kWarpSpecialised; its head dim is dkdv_head_dim
  bool announces_visits = false;  // sm90::BackwardForm
  bool adds_statistics = false;
  int64_t resident_blocks = 0;
  int64_t query_tiles_of_head = 0;  // in all sequences
  NanRepair nan_repair = NanRepair::kNone;
  int64_t l2_bytes = 0;

  struct Stored {
    int64_t rows = 0;
    int64_t columns = 0;
    int64_t bytes_of_matrices = 0;  // of P's, and of dS's, of one launch
    int64_t pairs_per_launch = 0;
    int64_t launches = 0;
    // kWarpSpecialisedStoring: where launches that share the queries of some pairs end, in tiles; empty: none do.
    std::vector<int> band_ends;
    int64_t key_tiles_of_matrix = 0;  // likewise: which hand on sums of dK and dV
  } stored;

  int64_t dq_parts = 1;  // blocks that share the keys of a tile of queries in whatever computes dQ

  int64_t alibi_partials_per_head = 0;

  struct Workspace {
    int64_t bytes = 0;
    WorkspacePart delta;
    WorkspacePart stored_scores;
    WorkspacePart mask_tiles;
    WorkspacePart mask_bits;  // of a boolean mask, packed: kWarpSpecialised and kWarpSpecialisedStoring
    WorkspacePart alibi_partials;
    WorkspacePart dq_nan_flags;  // one byte per warp of a launch
    WorkspacePart dkdv_nan_flags;
    WorkspacePart dq_parts;  // float32, of rows of dq_part_columns(); kWarpSpecialisedFewQueries: of blocks and heads
    // Warp-specialised: float32 sums, statistics of queries, whose turn it is, what can be claimed.
    WorkspacePart dq_sums;
    WorkspacePart statistics;
    WorkspacePart turns;
    WorkspacePart key_tiles;
    WorkspacePart claims;
    WorkspacePart key_sums;  // of dK and dV: of each query head of a group, or of bands before
    WorkspacePart arrivals;
  } workspace;

  bool is_warp_specialised() const {
    return kernels == BackwardKernels::kWarpSpecialised || kernels == BackwardKernels::kWarpSpecialisedStoring ||
           kernels == BackwardKernels::kWarpSpecialisedFewQueries;
  }
};

// Forward mode has a kernel for some calls; the others go over tiles as PyTorch operations.
struct TangentPlan {
  bool has_kernel = false;
  int head_dim = 0;  // that the kernel is compiled for
  int64_t l2_bytes = 0;
};

// In words, for people and for tests, such as "fused, 128 keys per block; delta by the first kernel; no workspace".
std::string describe(const ForwardPlan& plan);
std::string describe(const BackwardPlan& plan);
std::string describe(const TangentPlan& plan);  // that has a kernel

inline int64_t max_head_dim_sm80(attention::ElementType element) { return attention::is_16_bit(element) ? 512 : 256; }

// The plans of each backend. Of pointers they look at whether a tensor is there and how it is aligned, never at what it
// holds.
ForwardPlan plan_forward_cpu(const attention::ForwardParams& params, const Limits& limits);
BackwardPlan plan_backward_cpu(const attention::BackwardParams& params, const Limits& limits);
ForwardPlan plan_forward_sm80(const attention::ForwardParams& params, const Limits& limits);
BackwardPlan plan_backward_sm80(const attention::BackwardParams& params, const Limits& limits);
ForwardPlan plan_forward_sm90(const attention::ForwardParams& params, const Limits& limits);
BackwardPlan plan_backward_sm90(const attention::BackwardParams& params, const Limits& limits);
// Of any GPU backend.
TangentPlan plan_tangents(const attention::TangentParams& params, const Limits& limits);

// All of them, whether or not a backend was built: a plan needs no GPU.
struct Planner {
  const char* name;
  ForwardPlan (*forward)(const attention::ForwardParams& params, const Limits& limits);
  BackwardPlan (*backward)(const attention::BackwardParams& params, const Limits& limits);
};
inline constexpr Planner kPlanners[] = {{"sm90", plan_forward_sm90, plan_backward_sm90},
                                        {"sm80", plan_forward_sm80, plan_backward_sm80},
                                        {"cpu", plan_forward_cpu, plan_backward_cpu}};

}  // namespace flash_attn_ext::plan
