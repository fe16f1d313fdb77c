// mbarriers as csrc/ptx/barrier.h describes them.
#pragma once

namespace flash_attn_ext::ptx {

struct Barrier {
  int arrivals = 0;
  int pending = 0;
  int bytes = 0;      // that the phase still waits for
  int completed = 0;  // phases

  void complete_if_done() {
    if (pending > 0 || bytes != 0) return;
    pending = arrivals;
    ++completed;
  }
};

inline void init_barrier(Barrier& barrier, int arrivals) {
  barrier = {};
  barrier.arrivals = barrier.pending = arrivals;
}
inline void arrive(Barrier& barrier) {
  device::step();
  --barrier.pending;
  barrier.complete_if_done();
}
inline void arrive_expecting(Barrier& barrier, int bytes) {
  device::step();
  barrier.bytes += bytes;
  --barrier.pending;
  barrier.complete_if_done();
}
// Phases are told apart by their parity only, as in hardware: a thread that is two phases late waits for another phase.
inline void wait(Barrier& barrier, int parity) {
  device::step();
  while (((barrier.completed - 1) & 1) != parity) device::fibers().yield();
}
inline void fence_stores() {}

}  // namespace flash_attn_ext::ptx
