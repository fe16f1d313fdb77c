// What dq_outlet.cuh and dq_adders.cuh read of a backward kernel: the ring of csrc/, and a small dQ.
#pragma once

#include <type_traits>

#include "kernels/sm90/backward/dq_stages.h"
#include "ptx/barrier.h"
#include "tile/accumulator.h"

namespace flash_attn_ext::tile {

inline constexpr int kWarpgroupSize = 128;

template <int kColumns>
struct WarpgroupAccumulator {
  static constexpr int kColumnTiles = kColumns / 8;
  float c[1][kColumnTiles][4];
};

}  // namespace flash_attn_ext::tile

namespace flash_attn_ext::sm90 {

struct BackwardTile {
  int dq_columns;
};

template <int kPieces, bool kAnnounces>
struct SmallTraits {
  static constexpr BackwardTile kTile = {.dq_columns = 8};
  static constexpr bool kAnnouncesVisits = kAnnounces;
  static constexpr int kDqPieces = kPieces;
  static constexpr int kDqPieceFloats = tile::kWarpgroupSize * 4;
  static constexpr int kDqStageFloats = kAnnounces ? kDqPieceFloats : kPieces * kDqPieceFloats;
  using DqRing = std::conditional_t<kAnnounces, AnnouncedDqRing, WholeDqRing>;
};

struct BackwardWorkspace {
  float* dq_sums;
  int* turns;
};
struct BackwardArguments {
  BackwardWorkspace workspace;
};

inline constexpr int kDqWarps = 4;

template <class Traits>
struct BackwardShared {
  float dq[kDqStages][Traits::kDqStageFloats];
  PendingSum pending[kDqAdders];
  typename Traits::DqRing dq_ring;
};

// A named barrier. Warps know its phases by their number.
struct NamedBarrier {
  int arrived = 0;

  void sync() {
    device::step();
    const int phase = arrived++ / kDqWarps;
    while (arrived < (phase + 1) * kDqWarps) device::fibers().yield();
  }
};
inline NamedBarrier dq_warpgroup_barrier;
inline void meet_dq_warpgroup() { dq_warpgroup_barrier.sync(); }

}  // namespace flash_attn_ext::sm90
