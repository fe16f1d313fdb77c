// How the dQ warpgroup hands dQ of a visit to the adders, and how it takes the sums that earlier visitors have left if
// it is the last one (their engines' writes: dq_adders.cuh). Threads have the same place in all pieces.
#pragma once

#include "kernels/sm90/backward/traits.h"
#include "ptx/bulk_copy.h"
#include "ptx/global_memory.h"

namespace flash_attn_ext::sm90 {

// What the two ways share.
template <class Traits>
struct DqFloats {
  static constexpr int kThreads = tile::kWarpgroupSize;
  using Dq = tile::WarpgroupAccumulator<Traits::kTile.dq_columns>;

  __device__ __forceinline__ static int thread() { return static_cast<int>(threadIdx.x) % kThreads; }

  __device__ __forceinline__ static void leave(float* piece, const Dq& dq) {
    float* const to = piece + thread() * 4;
#pragma unroll
    for (int j = 0; j < Dq::kColumnTiles; ++j) {
      const float(&c)[4] = dq.c[0][j];
      *reinterpret_cast<float4*>(to + j * kThreads * 4) = {c[0], c[1], c[2], c[3]};
    }
  }

  // load: of 16 bytes.
  template <class Load>
  __device__ __forceinline__ static void add(Dq& dq, const float* piece, Load&& load) {
    const float* const from = piece + thread() * 4;
#pragma unroll
    for (int j = 0; j < Dq::kColumnTiles; ++j) {
      const float4 sum = load(reinterpret_cast<const float4*>(from + j * kThreads * 4));
      dq.c[0][j][0] += sum.x;
      dq.c[0][j][1] += sum.y;
      dq.c[0][j][2] += sum.z;
      dq.c[0][j][3] += sum.w;
    }
  }
};

// Of a visit the warpgroup calls begin() while its first product is in flight, begin_piece() likewise for each piece,
// then, when the product is there, leave(), or add_sums() if it is the last visitor, and finish().

// All of a visit's dQ is left before an adder hears of it. A last visitor's threads load the sums.
template <class Traits>
struct WholeDqOutlet {
  using Floats = DqFloats<Traits>;
  using Dq = typename Floats::Dq;

  const BackwardArguments& args;
  BackwardShared<Traits>& shared;
  typename Traits::DqRing::Position at{};

  __device__ __forceinline__ void begin(int, int, bool is_last) {
    if (!is_last) shared.dq_ring.wait_empty(at);
  }
  __device__ __forceinline__ void begin_piece(int, int, int, bool) {}

  __device__ __forceinline__ void leave(const Dq& dq, int piece) {
    Floats::leave(shared.dq[at.stage] + piece * Traits::kDqPieceFloats, dq);
  }

  __device__ __forceinline__ void add_sums(Dq& dq, int sums, int place, int piece) const {
    if (place <= 0) return;
    if (piece == 0) {
      while (ptx::load_acquire(args.workspace.turns + sums) < place) {
      }
      __syncwarp();
    }
    Floats::add(dq, args.workspace.dq_sums + (int64_t{sums} * Traits::kDqPieces + piece) * Traits::kDqPieceFloats,
                [](const float4* from) { return __ldcg(from); });
  }

  __device__ __forceinline__ void finish(int sums, int place, bool is_last) {
    if (!is_last) {
      ptx::fence_stores();
      publish(sums, place);
    }
  }

  __device__ __forceinline__ void end() {
#pragma unroll 1
    for (int i = 0; i < kDqAdders; ++i) {
      shared.dq_ring.wait_empty(at);
      publish(PendingSum::kEnd, 0);
    }
  }

 private:
  __device__ __forceinline__ void publish(int sums, int place) {
    if (Floats::thread() == 0) shared.pending[at.stage] = {sums, place};
    __syncwarp();
    if (tile::lane() == 0) ptx::arrive(shared.dq_ring.full[at.stage]);
    at.advance();
  }
};

// An adder hears of a visit before its pieces are computed. The copy engine brings the sums for a last visitor.
template <class Traits>
struct AnnouncedDqOutlet {
  using Floats = DqFloats<Traits>;
  using Dq = typename Floats::Dq;
  static constexpr int kPieces = Traits::kDqPieces;
  static constexpr int kPieceBytes = Traits::kDqPieceFloats * sizeof(float);

  const BackwardArguments& args;
  BackwardShared<Traits>& shared;
  typename Traits::DqRing::Position at{};
  int adder = 0;  // who hears of the next visit
  bool takes_sums = false;
  int fetched_parity = 0;  // of shared.dq_ring.fetched

  __device__ __forceinline__ void begin(int sums, int place, bool is_last) {
    takes_sums = is_last && place > 0;
    if (takes_sums) fetch(sums, place);
  }

  __device__ __forceinline__ void begin_piece(int sums, int place, int piece, bool is_last) {
    if (is_last) return;
    shared.dq_ring.wait_empty(at);
    if (piece == 0) announce(sums, place);
  }

  __device__ __forceinline__ void leave(const Dq& dq, int) {
    Floats::leave(shared.dq[at.stage], dq);
    ptx::fence_stores();
    __syncwarp();
    if (tile::lane() == 0) ptx::arrive(shared.dq_ring.full[at.stage]);
    at.advance();
  }

  __device__ __forceinline__ void add_sums(Dq& dq, int, int, int piece) const {
    if (!takes_sums) return;
    if (piece == 0) ptx::wait(shared.dq_ring.fetched, fetched_parity);
    Floats::add(dq, shared.dq[(at.stage + piece) % kDqStages], [](const float4* from) { return *from; });
  }

  __device__ __forceinline__ void finish(int, int, bool) {
    if (takes_sums) fetched_parity ^= 1;
  }

  __device__ __forceinline__ void end() {
    // Adders that have taken all pieces have read what they were told.
    for (int i = 0; i < kDqStages; ++i, at.advance()) shared.dq_ring.wait_empty(at);
    for (int i = 0; i < kDqAdders; ++i) announce(PendingSum::kEnd, 0);
  }

 private:
  // A stage for the visit's first piece is empty: so the adder has read what it was told before. All warps have left
  // the pieces of earlier visits then: parities that it waits for next are not theirs.
  __device__ __forceinline__ void announce(int sums, int place) {
    static_assert(kDqStages <= kDqAdders * kPieces);
    if (Floats::thread() == 0) shared.pending[adder] = {sums, place};
    __syncwarp();
    if (tile::lane() == 0) ptx::arrive(shared.dq_ring.announced[adder]);
    adder ^= 1;
  }

  // To empty stages of pieces, whose turn stays theirs.
  __device__ __forceinline__ void fetch(int sums, int place) {
    static_assert(kPieces <= kDqStages);
    meet_dq_warpgroup();  // nobody reads what was fetched before any more
    if (Floats::thread() == 0) {
      while (ptx::load_acquire(args.workspace.turns + sums) < place) {
      }
      ptx::fence_global_copies();
      ptx::arrive_expecting(shared.dq_ring.fetched, kPieces * kPieceBytes);
      const float* from = args.workspace.dq_sums + int64_t{sums} * kPieces * Traits::kDqPieceFloats;
      auto to = at;
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece, to.advance(), from += Traits::kDqPieceFloats) {
        shared.dq_ring.wait_empty(to);
        ptx::copy_bytes(shared.dq[to.stage], from, kPieceBytes, shared.dq_ring.fetched);
      }
    }
    __syncwarp();
  }
};

template <class Traits>
using DqOutlet = std::conditional_t<Traits::kAnnouncesVisits, AnnouncedDqOutlet<Traits>, WholeDqOutlet<Traits>>;

}  // namespace flash_attn_ext::sm90
