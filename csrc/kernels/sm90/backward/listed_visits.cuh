// The visits of a tile of keys that a mask leaves, for the thread that starts copies.
#pragma once

#include "kernels/sm90/backward/arguments.h"
#include "ptx/bulk_prefetch.h"

namespace flash_attn_ext::sm90 {

// Query heads come one after the other, each with its list; in a descending walk all of them, which share one, at a
// tile before the next. For tiles of keys that have visits.
struct ListedVisits {
  const BackwardArguments& args;
  const KeyTileWork& work;
  int head;  // of the visit

  __device__ __forceinline__ ListedVisits(const BackwardArguments& arguments, const KeyTileWork& tile)
      : args(arguments), work(tile), head(first_head()) {
    open();
  }

  __device__ __forceinline__ MaskVisits::Entry entry() const { return args.mask.entries[at_]; }

  // To the next visit, which is there.
  __device__ __forceinline__ void advance() {
    if (work.visitor.walk == Walk::kDescend) {
      if (++head == first_head() + work.heads) {
        head = first_head();
        ++at_;
      }
    } else if (++at_ == end_) {
      ++head;
      open();
    }
  }

  // Brings a visit's bits to L2.
  __device__ __forceinline__ void fetch(int tile) const {
    ptx::prefetch_bytes(args.mask.words + int64_t{tile} * MaskVisits::kThreads,
                        MaskVisits::kThreads * sizeof(uint32_t));
  }

 private:
  __device__ __forceinline__ int first_head() const {
    return (work.key_head * static_cast<int>(args.order.members) + work.member) * work.heads;
  }

  // The list of the head, or of the next one that has visits.
  __device__ __forceinline__ void open() {
#pragma unroll 1
    for (;; ++head) {
      const int64_t list = args.mask.list(work.batch, head, work.visitor.walk, work.visitor.tile);
      at_ = args.mask.first_entry(list);
      end_ = at_ + args.mask.counts[list];
      if (at_ != end_) break;
    }
  }

  uint32_t at_ = 0;  // entry
  uint32_t end_ = 0;
};

}  // namespace flash_attn_ext::sm90
