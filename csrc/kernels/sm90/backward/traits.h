// What a backward kernel is compiled for, and what lies in its shared memory.
#pragma once

#include <type_traits>

#include "kernels/schedule/schedule.cuh"
#include "kernels/score/score_tile.cuh"
#include "kernels/sm90/backward/arguments.h"
#include "kernels/sm90/backward/dq_stages.h"
#include "kernels/sm90/uniform.h"
#include "kernels/tile_config_sm90.h"
#include "tile/sm90/gemm.h"
#include "tile/sm90/ring.h"

namespace flash_attn_ext::sm90 {

// One tile of queries that a tile of keys visits.
struct alignas(16) Visit {
  int query_tile;                       // of the sequence
  int head;                             // of queries
  int sums;                             // that it adds to: their number in the workspace
  int place;                            // how many visitors come before
  bool is_last;                         // of all the visitors
  bool ends_tile;                       // of the tile of keys' visits
  bool is_partial[VisitOrder::kParts];  // whether something of the keys is hidden
};

// The same where a mask says which there are.
struct MaskedVisit : Visit {
  int mask_tile;  // MaskVisits::Entry
};

template <class ElementType, HeadDims kDimsValue, BackwardForm kForm>
struct BackwardTraits {
  using Element = ElementType;
  static constexpr HeadDims kDims = kDimsValue;
  static constexpr bool kMasked = kForm.variant == Variant::kMask;
  static constexpr bool kDrops = kForm.variant == Variant::kDropout;
  static constexpr bool kBiased = kForm.variant == Variant::kBiasMask;  // without a mask
  static constexpr bool kAddsStatistics = kForm.adds_statistics;
  static constexpr bool kKeepsShift = keeps_shift<Element>(kAddsStatistics);
  static constexpr BackwardTile kTile = backward_tile(kDims);
  // The last step has no code of its own, which would have to be fetched for each tile of keys: it starts a product in
  // vain instead. (H200, B2 H32 S4096, all True: 1318 -> 1241 us. Without a mask 534 -> 514 TFLOP/s at D64 full 8192,
  // 515 -> 523 causal; at head dim 128 1 % slower.)
  static constexpr bool kOneStep = kMasked && kTile.keys_in_registers;
  static constexpr bool kAnnouncesVisits = kForm.announces_visits;
  static constexpr BackwardRegisters kRegisters = backward_registers(kDims);
  static constexpr int kKeys = VisitOrder::kKeys;
  static constexpr int kQueries = VisitOrder::kQueries;
  static constexpr int kWarpgroups = VisitOrder::kParts;
  static constexpr int kThreads = tile::kWarpgroupSize * (kWarpgroups + 2);
  static_assert(kKeys == kWarpgroups * tile::kWarpgroupRows && kQueries == tile::kWarpgroupRows);
  // A warpgroup that asks for more than the others leave waits for ever.
  static_assert(kRegisters.copy + kWarpgroups * kRegisters.key + kRegisters.query <= 512);

  using QTile = tile::BoxTile<Element, kQueries, kDims.qk>;
  using DoutTile = tile::BoxTile<Element, kQueries, kDims.v>;
  using KTile = tile::BoxTile<Element, kKeys, kDims.qk>;
  using VTile = tile::BoxTile<Element, kKeys, kDims.v>;
  using DscoreTile = tile::BoxTile<Element, kQueries, kKeys>;
  using Scores = tile::WarpgroupAccumulator<kQueries>;  // rows are keys
  // Of a tile of queries (BackwardWorkspace).
  using Terms = BackwardWorkspace::Terms<Element>;
  using Statistics = std::conditional_t<kAddsStatistics, Terms[2], float[kBiased ? 3 : 2][kQueries]>;

  static constexpr int kDqPieces = kDims.qk / kTile.dq_columns;  // of a visit
  static constexpr int kDqPieceFloats = kQueries * kTile.dq_columns;
  static constexpr int kDqStageFloats = kAnnouncesVisits ? kDqPieceFloats : kDqPieces * kDqPieceFloats;
  using DqRing = std::conditional_t<kAnnouncesVisits, AnnouncedDqRing, WholeDqRing>;

  using Where = ScoreTile<Rows::kKeys, Scores>;
  using Visit = std::conditional_t<kMasked, MaskedVisit, sm90::Visit>;
};

// Where the threads of a key warpgroup meet: a named barrier, of which 0 is __syncthreads.
__device__ __forceinline__ void meet_key_warpgroup(int warpgroup) {
  ptx::sync_named(1 + warpgroup, tile::kWarpgroupSize);
}
// Likewise those of the dQ warpgroup.
__device__ __forceinline__ void meet_dq_warpgroup() { ptx::sync_named(1 + VisitOrder::kParts, tile::kWarpgroupSize); }

template <class Traits>
struct BackwardShared {
  static constexpr int kComputingWarps = 4 * Traits::kWarpgroups;
  static constexpr int kDqWarps = 4;
  static constexpr int kWorkStages = 2;
  static constexpr int kStages = Traits::kTile.query_stages;  // of what a visit reads, and of dS
  static constexpr int kKeyStages = Traits::kTile.key_stages;
  using Stage = tile::RingPosition<kStages>;
  // A visit is written when a stage of Q is free, and read last by the dQ warpgroup, as it takes dS from a stage. In
  // between there are no more visits than stages of both.
  static constexpr int kVisits = 2 * kStages;

  typename Traits::KTile k[kKeyStages];
  typename Traits::VTile v[kKeyStages];
  typename Traits::QTile q[kStages];
  typename Traits::DoutTile dout[kStages];
  typename Traits::DscoreTile dscores[kStages];
  alignas(128) float dq[kDqStages][Traits::kDqStageFloats];
  alignas(128) typename Traits::Statistics statistics[kStages];
  KeyTileWork work[kWorkStages];
  typename Traits::Visit visits[kVisits];
  PendingSum pending[kDqAdders];
  tile::RingBarriers<kStages> q_ring;  // its empty barriers stand for dout's, too
  ptx::Barrier dout_full[kStages];     // and the bias's
  tile::RingBarriers<kKeyStages> k_ring;
  tile::RingBarriers<kKeyStages> v_ring;
  tile::RingBarriers<kStages> dscore_ring;
  typename Traits::DqRing dq_ring;
  tile::RingBarriers<kWorkStages> work_ring;
  ptx::Barrier may_claim;            // all copies of a tile of keys have been started
  int arrived[Traits::kWarpgroups];  // MemberSums

  __device__ __forceinline__ typename Traits::Visit& visit(const Stage& at) {
    return visits[at.parity * kStages + at.stage];
  }

  __device__ __forceinline__ void init() {
    q_ring.init(kComputingWarps);
    for (auto& barrier : dout_full) ptx::init_barrier(barrier, 1);
    k_ring.init(kComputingWarps + kDqWarps);
    v_ring.init(kComputingWarps);
    dscore_ring.init(kDqWarps, kComputingWarps);
    dq_ring.init(kDqWarps);
    work_ring.init(kComputingWarps + kDqWarps + 1);
    ptx::init_barrier(may_claim, 1);
    ptx::fence_barrier_init();
  }
};

}  // namespace flash_attn_ext::sm90
