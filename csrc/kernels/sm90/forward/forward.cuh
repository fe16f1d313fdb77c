// Forward pass on Hopper: O = softmax(score(Q K^T)) V and its LSE (Dao 2023, "FlashAttention-2", algorithm 1; Shah et
// al. 2024, "FlashAttention-3", sections 3.1 and 3.2).
//
// Grid: ForwardConfig::ctas_per_sm persistent CTAs per SM. A dynamic tile scheduler hands out work tiles (batch,
// query head or packed heads, kQueries rows), longest first.
// Warpgroup 0 is the producer: one thread fetches work tiles and says which keys they see (scheduler.cuh), another one
// issues all TMA loads (producer.cuh). In kernels for a cache two warps do, one those of Q and K, the other those of V.
// In kernels for a key bias another warp writes it beside K (key_bias_writer.cuh).
// Each other warpgroup is a consumer of 64 of the queries (consumer.cuh): S, P and O live in its registers. The
// consumers run in ping-pong where ForwardConfig::ping_pong says so (stages.cuh).
// Shared memory: pipelines of one or two stages of Q and of two to four of K and V; biases and masks (ForwardShared).
// TMA zero-pads where a tensor ends.
#pragma once

#include "kernels/sm90/forward/consumer.cuh"
#include "kernels/sm90/forward/key_bias_writer.cuh"
#include "kernels/sm90/forward/producer.cuh"
#include "kernels/sm90/kernel.cuh"

namespace flash_attn_ext::sm90 {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kConfig.ctas_per_sm)
    forward_kernel(const __grid_constant__ typename Traits::Arguments args) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<ForwardShared<Traits>*>(shared_memory);
  const int warpgroup = warpgroup_index();
  if (Traits::kConfig.takes_entries_without_interval() && args.intervals.present()) {
    // The preceding kernel, which has waited for the scan of the mask or the bias, computes the batch entries with one
    // interval of keys. Most calls have no others.
    const bool has_work = args.intervals.any(/*with_interval=*/false);
    ptx::wait_for_kernel_before();
    if (!has_work) return;
  }
  init_barriers(shared);
  prefetch_descriptors({&args.q, &args.k, &args.v});
  __syncthreads();
  ptx::wait_for_kernel_before();
  if (warpgroup == 0) {
    ptx::release_registers<Traits::kRegisters.producer>();
    const int warp = uniform(tile::warp());
    using Producer = ForwardProducer<Traits>;
    if constexpr (Producer::kHasLanes) {
      if (warp == 0 || warp == 2) Producer{args, shared, warp == 0, warp == 2}.run();
    } else {
      if (warp == 0 && ptx::elect()) Producer{args, shared}.run();
    }
    if (warp == 1) ForwardScheduler<Traits>{args, shared}.start();
    if constexpr (Traits::kKeyBiasWarps > 0) {
      if (warp == 2) ForwardKeyBiasWriter<Traits>{args, shared}.run();
    }
  } else {
    ptx::acquire_registers<Traits::kRegisters.consumer>();
    using Consumer = ForwardConsumer<Traits>;
    if constexpr (Traits::kHasOnes) shared.set_ones();
    if constexpr (Traits::kGeneric) {
      Consumer{args, shared, warpgroup - 1, {shared.staged[tile::warp() - 4]}}.run();
    } else {
      Consumer{args, shared, warpgroup - 1}.run();
    }
  }
}

}  // namespace flash_attn_ext::sm90
