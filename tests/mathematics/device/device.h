// Device code on the host, for the programs of the folder above. The compiler includes this file first; it defines
// CUDA's keywords. The headers beside it replace those of csrc/ with the same path.
//
// A warp is one fiber, which stands for its first lane. Only one fiber runs at a time, until it calls step() or
// yield().
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#define __device__
#define __host__
#define __forceinline__ inline

struct uint4 {
  uint32_t x, y, z, w;
};
struct float4 {
  float x, y, z, w;
};
struct Index {
  unsigned x;
};
inline Index threadIdx{};

inline void __syncwarp() {}
template <class T>
T __ldcg(const T* from) {
  return *from;
}

namespace device {

class Fibers {
 public:
  explicit Fibers(uint32_t seed) : random_(seed) {}

  void start(std::function<void()> body, unsigned thread = 0) {
    auto fiber = std::make_unique<Fiber>();
    fiber->body = std::move(body);
    fiber->thread = thread;
    const double x = uniform();
    fiber->speed = x * x * x + 0.01;  // some are much slower than others
    fiber->stack.resize(1 << 16);
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack.data();
    fiber->context.uc_stack.ss_size = fiber->stack.size();
    fiber->context.uc_link = &main_;
    makecontext(&fiber->context, &Fibers::enter, 0);
    fibers_.push_back(std::move(fiber));
  }

  // Runs until all fibers have ended; false: one of them waits forever.
  bool run(int steps = 2'000'000) {
    current_fibers = this;
    while (!fibers_.empty()) {
      if (steps-- == 0) return false;
      const auto i = static_cast<size_t>(below(static_cast<int>(fibers_.size())));
      if (uniform() > fibers_[i]->speed) continue;
      current_ = fibers_[i].get();
      threadIdx.x = current_->thread;
      swapcontext(&main_, &current_->context);
      if (current_->ended) fibers_.erase(fibers_.begin() + static_cast<int64_t>(i));
    }
    return true;
  }

  void yield() { swapcontext(&current_->context, &main_); }
  double uniform() { return std::uniform_real_distribution<double>()(random_); }
  int below(int bound) { return std::uniform_int_distribution<int>(0, bound - 1)(random_); }
  const void* current() const { return current_; }

  static inline Fibers* current_fibers = nullptr;

 private:
  struct Fiber {
    std::function<void()> body;
    unsigned thread = 0;
    double speed = 1;
    bool ended = false;
    std::vector<char> stack;
    ucontext_t context{};
  };

  static void enter() {
    Fiber* const fiber = current_fibers->current_;
    fiber->body();
    fiber->ended = true;
  }

  std::mt19937 random_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  Fiber* current_ = nullptr;
  ucontext_t main_{};
};

inline Fibers& fibers() { return *Fibers::current_fibers; }

// Takes a random time, in which other fibers run.
inline void step() {
  for (int i = fibers().below(5); i > 0; --i) fibers().yield();
}

}  // namespace device
