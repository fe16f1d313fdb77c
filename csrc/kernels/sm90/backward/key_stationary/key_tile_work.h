// A work tile of the backward pass, as a persistent CTA fetches it: a key tile and the query tiles that see it.
#pragma once

#include "attention/sequence.h"
#include "kernels/schedule/loop_order.h"
#include "kernels/schedule/work_item.h"

namespace flash_attn_ext::sm90 {

// An entry of the table that list_key_tiles writes. It has 32-bit numbers, because the threads that
// read it have few registers.
struct alignas(16) KeyTileWork {
  static constexpr int kEnd = -1;

  int batch;  // kEnd: there are no more work tiles
  int key_head;
  int heads;        // query heads: a share of the KV group's
  int group_share;  // the number of that share
  int group_end;    // cyclic: the CTA fetches no other tile before all below this index are fetched
  int begin;        // the query tiles over which it iterates
  int end;
  int first;        // the first one of its loop
  int query_begin;  // of the sequence
  int key_begin;
  int first_sums;  // the accumulator for the sequence's first query tile: its number in a head
  int iterations;  // over all of its heads
  int number;      // the key tile's number among those of all key heads
  LoopOrder::Contributor contributor;
  TileRange own[LoopOrder::kKeyWarpgroups];  // the query tiles that see a warpgroup's keys

  FLASH_HOST_DEVICE attention::Sequence sequence() const {
    return {batch, query_begin, key_begin, contributor.num_queries, contributor.num_keys};
  }
};

static_assert(sizeof(KeyTileWork) == LoopOrder::kWorkBytes);

}  // namespace flash_attn_ext::sm90
