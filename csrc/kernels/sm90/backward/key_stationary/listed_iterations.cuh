// The iterations of a key tile that a mask leaves, for the thread that issues the TMA copies.
#pragma once

#include "kernels/sm90/backward/key_stationary/arguments.h"
#include "ptx/bulk_prefetch.h"

namespace flash_attn_ext::sm90 {

// The loop goes through the query heads one after the other, each with its own list. In descending order all heads
// share a list, and the loop goes through all of them at one query tile before it continues with the next tile. The key
// tile must have iterations.
struct ListedIterations {
  const BackwardArguments& args;
  const KeyTileWork& work;
  int head;  // of the iteration

  __device__ __forceinline__ ListedIterations(const BackwardArguments& arguments, const KeyTileWork& tile)
      : args(arguments), work(tile), head(first_head()) {
    open();
  }

  __device__ __forceinline__ MaskIterations::Entry entry() const { return args.mask.entries[at_]; }

  // Goes on to the next iteration, which must exist.
  __device__ __forceinline__ void advance() {
    if (work.contributor.direction == LoopDirection::kDescending) {
      if (++head == first_head() + work.heads) {
        head = first_head();
        ++at_;
      }
    } else if (++at_ == end_) {
      ++head;
      open();
    }
  }

  // Prefetches an iteration's bits to L2.
  __device__ __forceinline__ void fetch(int tile) const {
    ptx::prefetch_bytes(args.mask.words + int64_t{tile} * MaskIterations::kThreads,
                        MaskIterations::kThreads * sizeof(uint32_t));
  }

 private:
  __device__ __forceinline__ int first_head() const {
    return (work.key_head * static_cast<int>(args.order.group_shares) + work.group_share) * work.heads;
  }

  // Opens the list of the head, or of the next one that has iterations.
  __device__ __forceinline__ void open() {
#pragma unroll 1
    for (;; ++head) {
      const int64_t list = args.mask.list(work.batch, head, work.contributor.direction, work.contributor.tile);
      at_ = args.mask.first_entry(list);
      end_ = at_ + args.mask.counts[list];
      if (at_ != end_) break;
    }
  }

  uint32_t at_ = 0;  // the current entry
  uint32_t end_ = 0;
};

}  // namespace flash_attn_ext::sm90
