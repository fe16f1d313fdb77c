// A deterministic-order semaphore: work items that add to the same rows do so in the order of their ranks (their
// numbers), whichever threads run them.
//
// Threads fetch items in that order (work_queue.h), and all items go through the same steps in ascending order. So the
// predecessor of a waiting item is always running, and the first running item never waits.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <thread>
#include <vector>

namespace flash_attn_ext::cpu {

class OrderSemaphores {
 public:
  // An item follows the one `distance` before it; 0: no item waits.
  OrderSemaphores(int64_t num_items, int64_t distance)
      : distance_(distance), completed_(distance == 0 ? 0 : num_items) {}

  // One item's rank in the order. Its destructor releases the items that follow, also after an exception.
  class Rank {
   public:
    Rank(OrderSemaphores& semaphores, int64_t item) : semaphores_(semaphores), item_(item) {}
    Rank(const Rank&) = delete;
    Rank& operator=(const Rank&) = delete;
    ~Rank() { signal(kLast); }

    // Returns when the predecessor, and so every item of lower rank, has completed `step`.
    void wait(int64_t step) const {
      if (semaphores_.distance_ == 0 || item_ < semaphores_.distance_) return;
      const std::atomic<int64_t>& completed = semaphores_.completed_[item_ - semaphores_.distance_];
      while (completed.load(std::memory_order_acquire) <= step) std::this_thread::yield();
    }
    void wait_for_all() const { wait(kLast); }

    // Marks the steps up to this one as done, after every item of lower rank has done them.
    void signal(int64_t step) {
      wait(step);
      if (semaphores_.distance_ != 0) semaphores_.completed_[item_].store(step + 1, std::memory_order_release);
    }

   private:
    static constexpr int64_t kLast = std::numeric_limits<int64_t>::max() - 1;
    OrderSemaphores& semaphores_;
    int64_t item_;
  };

 private:
  int64_t distance_;
  std::vector<std::atomic<int64_t>> completed_;  // how many steps each item has completed
};

}  // namespace flash_attn_ext::cpu
