// A tile of keys as resident blocks of a backward pass take it.
#pragma once

#include "attention/sequence.h"
#include "kernels/plan/visit_order.h"
#include "kernels/schedule/tile_range.cuh"

namespace flash_attn_ext::sm90 {

// An entry of the table that the backward pass's first kernel makes: in 32-bit numbers, for threads of few registers.
struct alignas(16) KeyTileWork {
  static constexpr int kEnd = -1;

  int batch;  // kEnd: there are no more tiles
  int key_head;
  int heads;      // of queries, that it visits: a share of the group's
  int member;     // whose share of them
  int group_end;  // Walk::kCycle: nobody claims another tile before all claims below this one are made
  int begin;      // tiles of queries that it visits
  int end;
  int first;        // of them
  int query_begin;  // of the sequence
  int key_begin;
  int first_sums;  // of the sequence's first tile of queries, those that it adds to: their number among a head's
  int visits;      // of all heads
  int number;      // of the tile, among those of all key heads
  VisitOrder::Visitor visitor;
  TileRange own[VisitOrder::kParts];  // the tiles of queries that see a part's keys

  FLASH_HOST_DEVICE attention::Sequence sequence() const {
    return {batch, query_begin, key_begin, visitor.num_queries, visitor.num_keys};
  }
};

static_assert(sizeof(KeyTileWork) == VisitOrder::kWorkBytes);

}  // namespace flash_attn_ext::sm90
