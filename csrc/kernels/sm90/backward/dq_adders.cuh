// How dQ of visits is added to the sums in memory: by two threads, each visit when its turn has come. They take visits
// in turn, so that one may wait until what it added is written.
//
// Sequences whose offsets overlap, which nobody has checked, share sums. Their gradients are wrong then, but turns are
// only raised, and so everybody's comes: a visitor waits for those before it alone.
//
// Between blocks: the engine's completion makes what it wrote visible to the thread that waits for it (an implicit
// proxy fence); the release publishes that; the next visitor's acquire sees it, and its proxy fence orders its own copy
// after the acquire. PTX ISA, "async proxy" and "causality order".
#pragma once

#include "kernels/sm90/backward/traits.h"
#include "ptx/bulk_copy.h"
#include "ptx/global_memory.h"

namespace flash_attn_ext::sm90 {

// An adder of visits that are left whole: it hears of one when all of its dQ is there.
template <class Traits>
struct WholeDqAdder {
  const BackwardArguments& args;
  BackwardShared<Traits>& shared;
  const int stage;

  __device__ __forceinline__ void run() {
    constexpr int kFloats = Traits::kDqPieces * Traits::kDqPieceFloats;
    constexpr int kBytes = kFloats * sizeof(float);
#pragma unroll 1
    for (int parity = 0;; parity ^= 1) {
      ptx::wait(shared.dq_ring.full[stage], parity);
      const int number = shared.pending[stage].sums;
      const int place = shared.pending[stage].place;
      if (number == PendingSum::kEnd) break;
      float* const sums = args.workspace.dq_sums + int64_t{number} * kFloats;
      int* const turn = args.workspace.turns + number;
      if (place == 0) {
        ptx::store_bytes(sums, shared.dq[stage], kBytes);
      } else {
        while (ptx::load_acquire(turn) < place) {
        }
        ptx::fence_global_copies();
        ptx::add_floats(sums, shared.dq[stage], kBytes);
      }
      ptx::wait_until_read();
      ptx::arrive(shared.dq_ring.empty[stage]);
      ptx::wait_until_written();
      ptx::raise_releasing(turn, place + 1);
    }
  }
};

// An adder of visits that are announced: it hears of one before its pieces are computed, and waits for the turn
// meanwhile.
template <class Traits>
struct AnnouncedDqAdder {
  const BackwardArguments& args;
  BackwardShared<Traits>& shared;
  const int number;  // of the adder
  typename Traits::DqRing::Position piece_at{};

  __device__ __forceinline__ void run() {
    constexpr int kBytes = Traits::kDqPieceFloats * sizeof(float);
    if (number == 1) pass_visit();
#pragma unroll 1
    for (int parity = 0;; parity ^= 1) {
      ptx::wait(shared.dq_ring.announced[number], parity);
      const int sums = shared.pending[number].sums;
      const int place = shared.pending[number].place;
      if (sums == PendingSum::kEnd) break;
      float* to = args.workspace.dq_sums + int64_t{sums} * Traits::kDqPieces * Traits::kDqPieceFloats;
      int* const turn = args.workspace.turns + sums;
      if (place > 0) {
        while (ptx::load_acquire(turn) < place) {
        }
        ptx::fence_global_copies();
      }
#pragma unroll 1
      for (int piece = 0; piece < Traits::kDqPieces; ++piece) {
        shared.dq_ring.wait_full(piece_at);
        if (place == 0) {
          ptx::store_bytes(to, shared.dq[piece_at.stage], kBytes);
        } else {
          ptx::add_floats(to, shared.dq[piece_at.stage], kBytes);
        }
        ptx::wait_until_read();
        ptx::arrive(shared.dq_ring.empty[piece_at.stage]);
        piece_at.advance();
        to += Traits::kDqPieceFloats;
      }
      ptx::wait_until_written();
      ptx::raise_releasing(turn, place + 1);
      pass_visit();
    }
  }

 private:
  // The other adder's.
  __device__ __forceinline__ void pass_visit() {
#pragma unroll
    for (int piece = 0; piece < Traits::kDqPieces; ++piece) piece_at.advance();
  }
};

template <class Traits>
using DqAdder = std::conditional_t<Traits::kAnnouncesVisits, AnnouncedDqAdder<Traits>, WholeDqAdder<Traits>>;

}  // namespace flash_attn_ext::sm90
