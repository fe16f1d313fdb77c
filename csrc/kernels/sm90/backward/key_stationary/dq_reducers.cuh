// The reducer warps: two threads that add the partial dQ of iterations to the accumulators in memory, each when the
// semaphore has reached its rank. They alternate, so that one may wait until its addition is written while the other
// one goes on. In FlashAttention-3 the warp that stores dQ does this work.
//
// Packed sequences whose offsets overlap, which is not checked on a GPU, share accumulators and semaphores. Their
// gradients are wrong then, but the call ends: a semaphore is only raised, never set back, and a contributor only waits
// for those of lower rank.
//
// Memory ordering between CTAs: when a thread has waited for its bulk copy, it sees what the copy wrote (an implicit
// proxy fence). Its release of the semaphore publishes that. The next contributor's acquire sees the release, and its
// proxy fence orders its own bulk copy after the acquire. PTX ISA, "async proxy" and "causality order".
#pragma once

#include "kernels/sm90/backward/key_stationary/traits.h"
#include "ptx/bulk_copy.h"
#include "ptx/global_memory.h"

namespace flash_attn_ext::sm90 {

// The reducer of WholeDqEpilogue: it is signalled when all of an iteration's dQ is staged.
template <class Traits>
struct WholeDqReducer {
  const KeyStationaryArguments& args;
  KeyStationaryShared<Traits>& shared;
  const int stage;

  __device__ __forceinline__ void run() {
    constexpr int kFloats = Traits::kDqSlices * Traits::kDqSliceFloats;
    constexpr int kBytes = kFloats * sizeof(float);
#pragma unroll 1
    for (int parity = 0;; parity ^= 1) {
      ptx::wait(shared.dq_pipeline.full[stage], parity);
      const int accumulator = shared.pending[stage].accumulator;
      const int rank = shared.pending[stage].rank;
      if (accumulator == PendingSum::kEnd) break;
      float* const sums = args.workspace.dq_sums + int64_t{accumulator} * kFloats;
      int* const semaphore = args.workspace.dq_semaphores + accumulator;
      if (rank == 0) {
        ptx::store_bytes(sums, shared.dq[stage], kBytes);
      } else {
        while (ptx::load_acquire(semaphore) < rank) {
        }
        ptx::fence_global_copies();
        ptx::add_floats(sums, shared.dq[stage], kBytes);
      }
      ptx::wait_until_read();
      ptx::arrive(shared.dq_pipeline.empty[stage]);
      ptx::wait_until_written();
      ptx::raise_releasing(semaphore, rank + 1);
    }
  }
};

// The reducer of PreSignalledDqEpilogue: it is signalled before the iteration's slices are computed, and waits for the
// semaphore meanwhile.
template <class Traits>
struct PreSignalledDqReducer {
  const KeyStationaryArguments& args;
  KeyStationaryShared<Traits>& shared;
  const int index;  // of the reducer
  typename Traits::DqPipeline::State slice_state{};

  __device__ __forceinline__ void run() {
    constexpr int kBytes = Traits::kDqSliceFloats * sizeof(float);
    if (index == 1) skip_iteration();
#pragma unroll 1
    for (int parity = 0;; parity ^= 1) {
      ptx::wait(shared.dq_pipeline.pre_signalled[index], parity);
      const int accumulator = shared.pending[index].accumulator;
      const int rank = shared.pending[index].rank;
      if (accumulator == PendingSum::kEnd) break;
      float* to = args.workspace.dq_sums + int64_t{accumulator} * Traits::kDqSlices * Traits::kDqSliceFloats;
      int* const semaphore = args.workspace.dq_semaphores + accumulator;
      if (rank > 0) {
        while (ptx::load_acquire(semaphore) < rank) {
        }
        ptx::fence_global_copies();
      }
#pragma unroll 1
      for (int slice = 0; slice < Traits::kDqSlices; ++slice) {
        shared.dq_pipeline.consumer_wait(slice_state);
        if (rank == 0) {
          ptx::store_bytes(to, shared.dq[slice_state.stage], kBytes);
        } else {
          ptx::add_floats(to, shared.dq[slice_state.stage], kBytes);
        }
        ptx::wait_until_read();
        ptx::arrive(shared.dq_pipeline.empty[slice_state.stage]);
        slice_state.advance();
        to += Traits::kDqSliceFloats;
      }
      ptx::wait_until_written();
      ptx::raise_releasing(semaphore, rank + 1);
      skip_iteration();
    }
  }

 private:
  // Skips an iteration of the other reducer.
  __device__ __forceinline__ void skip_iteration() {
#pragma unroll
    for (int slice = 0; slice < Traits::kDqSlices; ++slice) slice_state.advance();
  }
};

template <class Traits>
using DqReducer =
    std::conditional_t<Traits::kConfig.pre_signals_dq, PreSignalledDqReducer<Traits>, WholeDqReducer<Traits>>;

}  // namespace flash_attn_ext::sm90
