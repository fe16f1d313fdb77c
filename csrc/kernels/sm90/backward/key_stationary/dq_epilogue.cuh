// dQ epilogue: the dQ warpgroup stages the partial dQ of an iteration in shared memory for a reducer (dq_reducers.cuh).
// The last contributor instead adds the accumulator in memory, to which the reducers of earlier contributors have
// written, to its own partial dQ. A thread's floats lie at the same place in every slice, so it overwrites none that
// another thread still reads.
#pragma once

#include "kernels/sm90/backward/key_stationary/traits.h"
#include "ptx/bulk_copy.h"
#include "ptx/global_memory.h"
#include "tile/sm90/register_order.h"

namespace flash_attn_ext::sm90 {

// A slice of an iteration's dQ.
template <class Traits>
using DqAccumulator = tile::WarpgroupAccumulator<Traits::kConfig.tile.dq_columns>;

// In each iteration the warpgroup calls begin() while its first GEMM is in flight, and begin_slice() while the GEMM of
// each slice of columns is. When a slice's GEMM is complete, it calls store_partial(), or add_sums() if it is the last
// contributor. At the end of the iteration it calls finish().

// Stages all of an iteration's dQ before it signals a reducer. The threads of a last contributor load the accumulator
// themselves.
template <class Traits>
struct WholeDqEpilogue {
  using Dq = DqAccumulator<Traits>;
  using InMemory = tile::RegisterOrder<Dq>;

  const KeyStationaryArguments& args;
  KeyStationaryShared<Traits>& shared;
  typename Traits::DqPipeline::State state{};

  __device__ __forceinline__ void begin(int, int, bool is_last) {
    if (!is_last) shared.dq_pipeline.producer_acquire(state);
  }
  __device__ __forceinline__ void begin_slice(int, int, int, bool) {}

  __device__ __forceinline__ void store_partial(const Dq& dq, int slice) {
    InMemory::store(shared.dq[state.stage] + slice * Traits::kDqSliceFloats + InMemory::own(), dq);
  }

  __device__ __forceinline__ void add_sums(Dq& dq, int accumulator, int rank, int slice) const {
    if (rank <= 0) return;
    if (slice == 0) {
      while (ptx::load_acquire(args.workspace.dq_semaphores + accumulator) < rank) {
      }
      __syncwarp();
    }
    const float* const from =
        args.workspace.dq_sums + (int64_t{accumulator} * Traits::kDqSlices + slice) * Traits::kDqSliceFloats;
    InMemory::template load<true>(dq, from + InMemory::own(), [](const float4* floats) { return __ldcg(floats); });
  }

  __device__ __forceinline__ void finish(int accumulator, int rank, bool is_last) {
    if (!is_last) {
      ptx::fence_stores();
      publish(accumulator, rank);
    }
  }

  __device__ __forceinline__ void end() {
#pragma unroll 1
    for (int i = 0; i < kDqReducers; ++i) {
      shared.dq_pipeline.producer_acquire(state);
      publish(PendingSum::kEnd, 0);
    }
  }

 private:
  __device__ __forceinline__ void publish(int accumulator, int rank) {
    if (InMemory::own() == 0) shared.pending[state.stage] = {accumulator, rank};
    __syncwarp();
    if (tile::lane() == 0) ptx::arrive(shared.dq_pipeline.full[state.stage]);
    state.advance();
  }
};

// Signals a reducer before the slices of the iteration are computed, so that the reducer waits for the semaphore
// meanwhile. For a last contributor the TMA copies the accumulator to shared memory.
template <class Traits>
struct PreSignalledDqEpilogue {
  using Dq = DqAccumulator<Traits>;
  using InMemory = tile::RegisterOrder<Dq>;
  static constexpr int kSlices = Traits::kDqSlices;
  static constexpr int kSliceBytes = Traits::kDqSliceFloats * sizeof(float);

  const KeyStationaryArguments& args;
  KeyStationaryShared<Traits>& shared;
  typename Traits::DqPipeline::State state{};
  int reducer = 0;  // the one that is signalled next
  bool loads_sums = false;
  int fetched_parity = 0;  // of shared.dq_pipeline.fetched

  __device__ __forceinline__ void begin(int accumulator, int rank, bool is_last) {
    loads_sums = is_last && rank > 0;
    if (loads_sums) fetch(accumulator, rank);
  }

  __device__ __forceinline__ void begin_slice(int accumulator, int rank, int slice, bool is_last) {
    if (is_last) return;
    shared.dq_pipeline.producer_acquire(state);
    if (slice == 0) pre_signal(accumulator, rank);
  }

  __device__ __forceinline__ void store_partial(const Dq& dq, int) {
    InMemory::store(shared.dq[state.stage] + InMemory::own(), dq);
    ptx::fence_stores();
    __syncwarp();
    if (tile::lane() == 0) ptx::arrive(shared.dq_pipeline.full[state.stage]);
    state.advance();
  }

  __device__ __forceinline__ void add_sums(Dq& dq, int, int, int slice) const {
    if (!loads_sums) return;
    if (slice == 0) ptx::wait(shared.dq_pipeline.fetched, fetched_parity);
    InMemory::template load<true>(dq, shared.dq[(state.stage + slice) % kDqStages] + InMemory::own(),
                                  [](const float4* floats) { return *floats; });
  }

  __device__ __forceinline__ void finish(int, int, bool) {
    if (loads_sums) fetched_parity ^= 1;
  }

  __device__ __forceinline__ void end() {
    // When the reducers have emptied all stages, they have read their earlier signals.
    for (int i = 0; i < kDqStages; ++i, state.advance()) shared.dq_pipeline.producer_acquire(state);
    for (int i = 0; i < kDqReducers; ++i) pre_signal(PendingSum::kEnd, 0);
  }

 private:
  // The stage of the iteration's first slice is empty, so the reducer has read its previous signal. All warps have
  // stored the slices of earlier iterations by then. So the parity for which the reducer waits next cannot be that of
  // an earlier phase.
  __device__ __forceinline__ void pre_signal(int accumulator, int rank) {
    static_assert(kDqStages <= kDqReducers * kSlices);
    if (InMemory::own() == 0) shared.pending[reducer] = {accumulator, rank};
    __syncwarp();
    if (tile::lane() == 0) ptx::arrive(shared.dq_pipeline.pre_signalled[reducer]);
    reducer ^= 1;
  }

  // Copies the accumulator into empty stages. It does not advance the pipeline state: the next slices are staged there.
  __device__ __forceinline__ void fetch(int accumulator, int rank) {
    static_assert(kSlices <= kDqStages);
    sync_dq_warpgroup();  // no thread still reads what was fetched before
    if (InMemory::own() == 0) {
      while (ptx::load_acquire(args.workspace.dq_semaphores + accumulator) < rank) {
      }
      ptx::fence_global_copies();
      ptx::arrive_expecting(shared.dq_pipeline.fetched, kSlices * kSliceBytes);
      const float* from = args.workspace.dq_sums + int64_t{accumulator} * kSlices * Traits::kDqSliceFloats;
      auto to = state;
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice, to.advance(), from += Traits::kDqSliceFloats) {
        shared.dq_pipeline.producer_acquire(to);
        ptx::copy_bytes(shared.dq[to.stage], from, kSliceBytes, shared.dq_pipeline.fetched);
      }
    }
    __syncwarp();
  }
};

template <class Traits>
using DqEpilogue =
    std::conditional_t<Traits::kConfig.pre_signals_dq, PreSignalledDqEpilogue<Traits>, WholeDqEpilogue<Traits>>;

}  // namespace flash_attn_ext::sm90
