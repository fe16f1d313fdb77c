// Lets work items that add to the same rows do so in the order of their numbers, whichever threads run them.
//
// Items are claimed in that order (work_queue.h) and walk the same steps upwards, so a waiting item's predecessor is
// always at work, and the first one at work waits for nobody.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <thread>
#include <vector>

namespace flash_attn_ext::cpu {

class Turns {
 public:
  // An item follows the one `distance` before it; 0: no item waits.
  Turns(int64_t num_items, int64_t distance) : distance_(distance), passed_(distance == 0 ? 0 : num_items) {}

  // One item's place. Its end lets the followers go on, also when it ends by an exception.
  class Turn {
   public:
    Turn(Turns& turns, int64_t item) : turns_(turns), item_(item) {}
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    ~Turn() { pass(kLast); }

    // Returns when the predecessor, and so every item before it, has passed `step`.
    void wait(int64_t step) const {
      if (turns_.distance_ == 0 || item_ < turns_.distance_) return;
      const std::atomic<int64_t>& passed = turns_.passed_[item_ - turns_.distance_];
      while (passed.load(std::memory_order_acquire) <= step) std::this_thread::yield();
    }
    void wait_for_all() const { wait(kLast); }

    // Done with the steps up to this one, as every item before it is by then.
    void pass(int64_t step) {
      wait(step);
      if (turns_.distance_ != 0) turns_.passed_[item_].store(step + 1, std::memory_order_release);
    }

   private:
    static constexpr int64_t kLast = std::numeric_limits<int64_t>::max() - 1;
    Turns& turns_;
    int64_t item_;
  };

 private:
  int64_t distance_;
  std::vector<std::atomic<int64_t>> passed_;  // how many steps each item has passed
};

}  // namespace flash_attn_ext::cpu
