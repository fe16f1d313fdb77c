// The visits of a tile of keys that a mask leaves, for the thread that starts copies.
#pragma once

#include "kernels/sm90/backward/arguments.h"
#include "ptx/bulk_copy.h"

namespace flash_attn_ext::sm90 {

// Query heads come one after the other, each with its list; in a descending walk all of them, which share one, at a tile
// before the next. An entry is read one visit ahead: it comes from L2.
struct ListedVisits {
  const MaskVisits& mask;
  const KeyTileWork& work;
  int head;  // of the next visit
  int first_mask_tile = 0;

  __device__ __forceinline__ ListedVisits(const MaskVisits& mask_visits, const KeyTileWork& tile, int first_head)
      : mask(mask_visits), work(tile), head(first_head), first_head_(first_head) {}

  // Only where there are visits, here and below.
  __device__ __forceinline__ void begin() {
    open();
    ahead_ = *at_;
  }

  __device__ __forceinline__ MaskVisits::Entry next(bool has_more) {
    const MaskVisits::Entry entry = ahead_;
    if (!has_more) return entry;
    if (work.visitor.walk == Walk::kDescend) {
      if (++head == first_head_ + work.heads) {
        head = first_head_;
        ++at_;
      }
      find_mask_tile();
    } else if (++at_ == end_) {
      ++head;
      open();
    }
    ahead_ = *at_;
    return entry;
  }

  // Brings the bits of a visit to come to L2.
  __device__ __forceinline__ void fetch(int tile) const {
    ptx::fetch_bytes(mask.words + int64_t{tile} * MaskVisits::kThreads, MaskVisits::kThreads * sizeof(uint32_t));
  }

 private:
  // The list of the head, or of the next one that has visits.
  __device__ __forceinline__ void open() {
    for (;; ++head) {
      const int64_t list = mask.list(work.batch, head, work.visitor.walk, work.visitor.tile);
      at_ = mask.entries_of(list);
      end_ = at_ + mask.counts[list];
      if (at_ != end_) break;
    }
    find_mask_tile();
  }
  __device__ __forceinline__ void find_mask_tile() {
    first_mask_tile = mask.first_tile(work.batch, head, work.visitor.tile);
  }

  const int first_head_;
  const MaskVisits::Entry* at_ = nullptr;
  const MaskVisits::Entry* end_ = nullptr;
  MaskVisits::Entry ahead_ = {};
};

}  // namespace flash_attn_ext::sm90
