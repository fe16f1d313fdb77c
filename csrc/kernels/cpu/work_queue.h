// Runs numbered work items on all threads, each claiming the next one: tiles of a causal problem differ in cost. No
// result depends on who runs what, since an item owns what it writes.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace flash_attn_ext::cpu {

// make_worker() is called once on each thread (it holds the scratch memory), worker(item) once for each item.
template <class MakeWorker>
void run_items(int64_t num_items, MakeWorker&& make_worker) {
  std::atomic<int64_t> next{0};
  const int64_t num_threads = std::min<int64_t>(at::get_num_threads(), num_items);
  at::parallel_for(0, num_threads, 1, [&](int64_t begin, int64_t end) {
    auto worker = make_worker();
    for (int64_t item = next++; item < num_items; item = next++) worker(item);
  });
}

}  // namespace flash_attn_ext::cpu
