// Which of VisitOrder's visits a boolean mask leaves, and its bits as the threads of a visit hold scores: how much
// memory that takes, and what lies where.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "kernels/plan/visit_order.h"

namespace flash_attn_ext {

// A tile of the mask has the keys and queries of a visit. Its bits are a word for each thread that computes scores of
// the visit, bit 16 e + 8 r + j for the thread's key 8 r and query 8 j + e; what is not there has zeros. Beside them
// lies whether anything may be seen, and whether anything is hidden.
//
// A list has the visits of a tile of keys in the order of its walk, of those tiles of queries that see something of it
// through the mask too. Places count visitors that are left, so a tile waits for some of those that it would wait for
// without a mask: the order stays free of deadlock. Batch entries and heads that share a mask share tiles and lists,
// but for packed sequences, whose lengths differ.
struct MaskVisits {
  static constexpr int kThreads = 256;  // that compute scores of a visit
  static constexpr uint8_t kSomeTrue = 1;
  static constexpr uint8_t kSomeFalse = 2;

  struct alignas(16) Entry {
    static constexpr int kNothingMasked = -1;

    int query_tile;
    int place;      // how many visitors come before
    int is_last;    // of all visitors
    int mask_tile;  // kNothingMasked: the mask hides nothing of it
  };

  int key_tiles = 0;  // of the longest sequence
  int query_tiles = 0;
  int mask_query_tiles = 0;  // 1 where the mask is broadcast over queries; likewise:
  int mask_heads = 0;
  int mask_batches = 0;
  int list_batches = 0;
  int walks = 0;  // that pairs of the order take: one, or climbing and descending

  uint32_t* words = nullptr;
  Entry* entries = nullptr;
  int* counts = nullptr;     // of each list's visits
  uint8_t* tiles = nullptr;  // of the mask: kSomeTrue, kSomeFalse

  FLASH_HOST_DEVICE bool present() const { return words != nullptr; }
  FLASH_HOST_DEVICE int64_t num_tiles() const {
    return int64_t{mask_batches} * mask_heads * key_tiles * mask_query_tiles;
  }
  FLASH_HOST_DEVICE int64_t num_lists() const { return int64_t{list_batches} * mask_heads * walks * key_tiles; }
  // In 32 bits.
  static bool may_be_numbered(const attention::AttentionParams& p, const VisitOrder& order) {
    const MaskVisits visits = of(p, order);
    return visits.num_tiles() <= INT32_MAX && visits.num_lists() * visits.query_tiles <= INT32_MAX;
  }
  static int64_t bytes(const attention::AttentionParams& p, const VisitOrder& order) {
    const MaskVisits visits = of(p, order);
    return visits.bytes_of_words() + visits.bytes_of_entries() + visits.bytes_of_counts() + visits.num_tiles();
  }

  // In bytes(p, order) of memory, aligned to 16 bytes.
  static MaskVisits in(void* memory, const attention::AttentionParams& p, const VisitOrder& order) {
    MaskVisits visits = of(p, order);
    char* at = static_cast<char*>(memory);
    visits.words = reinterpret_cast<uint32_t*>(at);
    visits.entries = reinterpret_cast<Entry*>(at += visits.bytes_of_words());
    visits.counts = reinterpret_cast<int*>(at += visits.bytes_of_entries());
    visits.tiles = reinterpret_cast<uint8_t*>(at + visits.bytes_of_counts());
    return visits;
  }

  // The number of a tile of the mask; those of a tile of keys come one after the other.
  FLASH_HOST_DEVICE int first_tile(int batch, int head, int key_tile) const {
    const int plane = (mask_batches == 1 ? 0 : batch) * mask_heads + (mask_heads == 1 ? 0 : head);
    return (plane * key_tiles + key_tile) * mask_query_tiles;
  }
  FLASH_HOST_DEVICE int tile(int first, int query_tile) const {
    return mask_query_tiles == 1 ? first : first + query_tile;
  }

  FLASH_HOST_DEVICE int64_t list(int batch, int head, Walk walk, int key_tile) const {
    const int plane = (list_batches == 1 ? 0 : batch) * mask_heads + (mask_heads == 1 ? 0 : head);
    return (int64_t{plane} * walks + (walk == Walk::kDescend ? 1 : 0)) * key_tiles + key_tile;
  }
  // The number of its first entry.
  FLASH_HOST_DEVICE uint32_t first_entry(int64_t list) const { return static_cast<uint32_t>(list * query_tiles); }

  // The tile of queries that comes i-th in a walk from which nothing is left out.
  FLASH_HOST_DEVICE static int query_tile(const VisitOrder::Visitor& visitor, const VisitOrder::Tiles& visited, int i) {
    if (visitor.walk == Walk::kDescend) return visited.end - 1 - i;
    const int at = i + (visitor.walk == Walk::kCycle ? visitor.first_of_cycle() : visited.begin);
    return at < visited.end ? at : at - visited.end + visited.begin;
  }

  // A visitor's place among those that are left: is_left(tile of keys) is 1 for these, and 0 for others.
  template <class IsLeft>
  FLASH_HOST_DEVICE static Entry entry(const VisitOrder::Visitor& visitor, int query_tile, const IsLeft& is_left) {
    const VisitOrder::Tiles visitors = visitor.visitors(query_tile);
    const int own_place = visitor.place(query_tile, visitors);
    VisitOrder::Visitor other = visitor;
    int before = 0;
    int all = 0;
    for (other.tile = visitors.begin; other.tile < visitors.end; ++other.tile) {
      const int one = is_left(other.tile);
      all += one;
      before += other.place(query_tile, visitors) < own_place ? one : 0;
    }
    return {query_tile, before, before + 1 == all ? 1 : 0, Entry::kNothingMasked};
  }

 private:
  int64_t bytes_of_words() const { return num_tiles() * kThreads * int64_t{sizeof(uint32_t)}; }
  int64_t bytes_of_entries() const { return num_lists() * query_tiles * int64_t{sizeof(Entry)}; }
  int64_t bytes_of_counts() const { return num_lists() * int64_t{sizeof(int)}; }

  static MaskVisits of(const attention::AttentionParams& p, const VisitOrder& order) {
    const attention::BroadcastView& mask = p.score_mod.mask;
    MaskVisits visits;
    visits.key_tiles = VisitOrder::num_tiles(p.sequences.max_seqlen_k, VisitOrder::kKeys);
    visits.query_tiles = VisitOrder::num_tiles(p.sequences.max_seqlen_q, VisitOrder::kQueries);
    visits.mask_query_tiles = mask.query_stride == 0 ? 1 : visits.query_tiles;
    visits.mask_heads = mask.head_stride == 0 ? 1 : static_cast<int>(p.num_heads_q);
    visits.mask_batches = mask.batch_stride == 0 ? 1 : static_cast<int>(p.batch);
    visits.list_batches = p.sequences.cu_seqlens_q != nullptr ? static_cast<int>(p.batch) : visits.mask_batches;
    visits.walks = order.cyclic ? 1 : 2;
    return visits;
  }
};

}  // namespace flash_attn_ext
