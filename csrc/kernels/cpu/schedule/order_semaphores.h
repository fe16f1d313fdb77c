// A deterministic-order semaphore: work tiles that add to the same rows do so in the order of their ranks (their
// numbers), whichever threads run them.
//
// Threads fetch work tiles in that order (work_queue.h), and all work tiles go through the same steps in ascending
// order. So the predecessor of a waiting work tile is always running, and the first running work tile never waits.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <thread>
#include <vector>

namespace flash_attn_ext::cpu {

class OrderSemaphores {
 public:
  // A work tile follows the one `distance` before it; 0: no work tile waits.
  OrderSemaphores(int64_t num_work_tiles, int64_t distance)
      : distance_(distance), completed_(distance == 0 ? 0 : num_work_tiles) {}

  // One work tile's rank in the order. Its destructor releases the work tiles that follow, also after an exception.
  class Rank {
   public:
    Rank(OrderSemaphores& semaphores, int64_t work_tile) : semaphores_(semaphores), work_tile_(work_tile) {}
    Rank(const Rank&) = delete;
    Rank& operator=(const Rank&) = delete;
    ~Rank() { signal(kLast); }

    // Returns when the predecessor, and so every work tile of lower rank, has completed `step`.
    void wait(int64_t step) const {
      if (semaphores_.distance_ == 0 || work_tile_ < semaphores_.distance_) return;
      const std::atomic<int64_t>& completed = semaphores_.completed_[work_tile_ - semaphores_.distance_];
      while (completed.load(std::memory_order_acquire) <= step) std::this_thread::yield();
    }
    void wait_for_all() const { wait(kLast); }

    // Marks the steps up to this one as done, after every work tile of lower rank has done them.
    void signal(int64_t step) {
      wait(step);
      if (semaphores_.distance_ != 0) semaphores_.completed_[work_tile_].store(step + 1, std::memory_order_release);
    }

   private:
    static constexpr int64_t kLast = std::numeric_limits<int64_t>::max() - 1;
    OrderSemaphores& semaphores_;
    int64_t work_tile_;
  };

 private:
  int64_t distance_;
  std::vector<std::atomic<int64_t>> completed_;  // how many steps each work tile has completed
};

}  // namespace flash_attn_ext::cpu
