// What is known of each GPU.
#pragma once

#include <atomic>
#include <mutex>

#include "library/kernels.h"

namespace flash_attn_ext::library {

class KeptGpus {
 public:
  static constexpr int kMost = 128;

  // ask(): the GPU of a device from 0 to kMost - 1. An answer is kept, since each call asks. A failure is not, since a
  // driver may be ready later: the next call asks again, and what this one returns lasts until the thread's next
  // failure.
  template <class Ask>
  const Gpu& of(int device, Ask ask) {
    Entry& entry = entries_[device];
    if (entry.is_known.load(std::memory_order_acquire)) return entry.gpu;
    const std::lock_guard lock(mutex_);
    if (entry.is_known.load(std::memory_order_relaxed)) return entry.gpu;
    const Gpu answer = ask();
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
    Gpu gpu = {};
  };
  std::mutex mutex_;
  Entry entries_[kMost];
};

}  // namespace flash_attn_ext::library
