// A work queue: each thread fetches the next of the numbered work tiles when it has finished one, because tiles of a
// causal problem differ in cost. No result depends on which thread runs a work tile, because a work tile owns what it
// writes.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "attention/division.h"
#include "kernels/cpu/services.h"

namespace flash_attn_ext::cpu {

// make_worker() is called once on each thread (a worker holds the scratch memory), and worker(work_tile) once for each
// work tile. A thread fetches `grain` neighbouring work tiles at a time.
template <class MakeWorker>
void run_work_tiles(int64_t num_work_tiles, int64_t grain, MakeWorker&& make_worker) {
  std::atomic<int64_t> next{0};
  const int64_t num_threads = std::min<int64_t>(services().num_threads(), attention::ceil_div(num_work_tiles, grain));
  parallel_for(num_threads, 1, [&](int64_t, int64_t) {
    auto worker = make_worker();
    for (int64_t first = next.fetch_add(grain); first < num_work_tiles; first = next.fetch_add(grain)) {
      const int64_t end = std::min(first + grain, num_work_tiles);
      for (int64_t work_tile = first; work_tile < end; ++work_tile) worker(work_tile);
    }
  });
}

template <class MakeWorker>
void run_work_tiles(int64_t num_work_tiles, MakeWorker&& make_worker) {
  run_work_tiles(num_work_tiles, 1, make_worker);
}

// How many work tiles a thread fetches at a time if neighbouring work tiles share what it keeps. Each thread still
// fetches often enough for the load to even out.
inline int64_t grain_of_neighbours(int64_t num_work_tiles) {
  constexpr int64_t kFetchesPerThread = 8;
  return std::max<int64_t>(1, num_work_tiles / (kFetchesPerThread * services().num_threads()));
}

// Uninitialised memory for tiles, aligned to a cache line.
template <class Real>
class Scratch {
 public:
  Scratch() = default;
  explicit Scratch(int64_t size) { reserve(size); }

  // Makes room for `size` elements. If the memory has to grow, its contents are lost.
  void reserve(int64_t size) {
    if (size <= capacity_) return;
    memory_.reset();  // comes first, so that both are never held at once
    memory_.reset(static_cast<Real*>(::operator new(static_cast<size_t>(size) * sizeof(Real), kAlignment)));
    capacity_ = size;
  }

  Real* data() { return memory_.get(); }
  const Real* data() const { return memory_.get(); }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Release {
    void operator()(Real* memory) const { ::operator delete(memory, kAlignment); }
  };

  std::unique_ptr<Real, Release> memory_;
  int64_t capacity_ = 0;
};

}  // namespace flash_attn_ext::cpu
