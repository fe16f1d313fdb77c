// mbarriers in shared memory, which count arrivals and bytes; named barriers of a CTA's warps; and proxy fences.
#pragma once

#include <cstdint>

#include "ptx/shared_memory.h"

namespace flash_attn_ext::ptx {

using Barrier = uint64_t;  // in shared memory, 8-byte aligned

// PTX ISA, mbarrier.init: a phase ends after `arrivals` arrivals, once all expected bytes have arrived.
__device__ __forceinline__ void init_barrier(Barrier& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

// PTX ISA, fence.mbarrier_init: makes initialised barriers visible to TMA.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// PTX ISA, mbarrier.arrive, with release semantics in the CTA.
__device__ __forceinline__ void arrive(Barrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

// PTX ISA, mbarrier.arrive.expect_tx: arrives, and the phase also waits for `bytes` of TMA loads.
__device__ __forceinline__ void arrive_expecting(Barrier& barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
               : "memory");
}

// PTX ISA, mbarrier.try_wait.parity: waits until the phase of that parity has ended, and acquires what arrivals
// released. The phase of parity 1 of a fresh barrier counts as ended.
__device__ __forceinline__ void wait(Barrier& barrier, int parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra end;\n"
      "bra again;\n"
      "end: }" ::"r"(shared_address(&barrier)),
      "r"(parity)
      : "memory");
}

// PTX ISA, fence.proxy.async: makes this thread's stores to shared memory visible to wgmma and TMA.
__device__ __forceinline__ void fence_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// PTX ISA, barrier.cta: named barriers of `threads` threads. sync arrives and waits; arrive does not wait.
__device__ __forceinline__ void sync_named(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive_named(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace flash_attn_ext::ptx
