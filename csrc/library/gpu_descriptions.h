// Descriptions of GPUs. Each is kept once it has succeeded.
#pragma once

#include <atomic>
#include <mutex>

#include "library/kernels.h"

namespace flash_attn_ext::library {

class GpuDescriptions {
 public:
  static constexpr int kMost = 128;

  // describe(): the description of a device from 0 to kMost - 1. It is kept, since each call needs it. A failure is
  // not, since a driver may be ready later: the next call asks again, and what this one returns lasts until the
  // thread's next failure. While one device is asked, calls for others do not wait.
  template <class Describe>
  const Gpu& of(int device, Describe describe) {
    Entry& entry = entries_[device];
    if (entry.is_known.load(std::memory_order_acquire)) return entry.gpu;
    const std::lock_guard lock(entry.mutex);
    if (entry.is_known.load(std::memory_order_relaxed)) return entry.gpu;
    const Gpu answer = describe();
    if (answer.status != 0) {
      thread_local Gpu failure;
      return failure = answer;
    }
    entry.gpu = answer;
    entry.is_known.store(true, std::memory_order_release);
    return entry.gpu;
  }

 private:
  struct Entry {
    std::atomic<bool> is_known = false;
    std::mutex mutex;
    Gpu gpu = {};
  };
  Entry entries_[kMost];
};

}  // namespace flash_attn_ext::library
