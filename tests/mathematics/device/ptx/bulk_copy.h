// TMA as csrc/ptx/bulk_copy.h describes it: it reads and writes at random times.
#pragma once

#include "ptx/barrier.h"

namespace flash_attn_ext::ptx {

struct Copy {
  float* target;
  const float* source;
  int bytes;
  bool adds;
  const void* issuer;  // of copies to global memory, which the issuer may wait for
  Barrier* barrier;    // of copies to shared memory
  bool is_read = false;
  std::vector<float> held{};
};

struct Tma {
  std::deque<Copy> copies;
  int users = 0;  // fibers that have not ended

  // Runs in a fiber of its own. It advances a random copy by one step, so two copies of one issuer may overtake each
  // other.
  void run() {
    while (users > 0 || !copies.empty()) {
      device::fibers().yield();
      if (!copies.empty()) advance(device::fibers().below(static_cast<int>(copies.size())));
    }
  }

  void issue(Copy copy) {
    device::step();
    copies.push_back(std::move(copy));
  }

  void wait(bool until_written) {
    const void* const issuer = device::fibers().current();
    const auto is_pending = [&] {
      for (const Copy& copy : copies) {
        if (copy.issuer == issuer && (until_written || !copy.is_read)) return true;
      }
      return false;
    };
    device::step();
    while (is_pending()) device::fibers().yield();
  }

  static inline Tma* current = nullptr;

 private:
  void advance(int index) {
    Copy& copy = copies[static_cast<size_t>(index)];
    const int floats = copy.bytes / 4;
    if (!copy.is_read) {
      copy.held.assign(copy.source, copy.source + floats);
      copy.is_read = true;
      return;
    }
    for (int i = 0; i < floats; ++i)
      copy.target[i] = copy.held[static_cast<size_t>(i)] + (copy.adds ? copy.target[i] : 0);
    if (copy.barrier != nullptr) {
      copy.barrier->bytes -= copy.bytes;
      copy.barrier->complete_if_done();
    }
    copies.erase(copies.begin() + index);
  }
};

inline void copy_bytes(float* target, const float* source, int bytes, Barrier& barrier) {
  Tma::current->issue(
      {.target = target, .source = source, .bytes = bytes, .adds = false, .issuer = nullptr, .barrier = &barrier});
}
inline void to_global(float* target, const float* source, int bytes, bool adds) {
  const void* const issuer = device::fibers().current();
  Tma::current->issue(
      {.target = target, .source = source, .bytes = bytes, .adds = adds, .issuer = issuer, .barrier = nullptr});
}
inline void store_bytes(float* target, const float* source, int bytes) { to_global(target, source, bytes, false); }
inline void add_floats(float* target, const float* source, int bytes) { to_global(target, source, bytes, true); }
inline void wait_until_read() { Tma::current->wait(false); }
inline void wait_until_written() { Tma::current->wait(true); }
inline void fence_global_copies() {}

}  // namespace flash_attn_ext::ptx
