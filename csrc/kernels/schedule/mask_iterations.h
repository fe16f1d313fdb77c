// Which iterations of a LoopOrder a boolean mask leaves, or intervals or blocks leave, and a mask's bits in the order
// in which the threads of an iteration hold scores. This file says how much memory these take, and where each lies.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "kernels/schedule/loop_order.h"

namespace flash_attn_ext {

// A mask tile has the keys and queries of one iteration. Each thread that computes scores of the iteration has a word
// of it: bit 16 e + 8 r + j belongs to the thread's key 8 r and query 8 j + e. Keys and queries that do not exist have
// zeros. Each tile has two flags beside its words: whether it has a bit that is set, and one that is not. With
// intervals there are no words: threads compute their bits. Nor are there with blocks: they hide all or nothing of an
// iteration from the 64 keys of a warpgroup.
//
// A list has the iterations of a key tile in its loop order, without those in which the mask hides everything. Ranks
// count the contributors that are left. So a key tile waits for some of those for which it would wait without a mask,
// and the order stays free of deadlock. Batch entries and heads that share a mask share tiles and lists. Only packed
// sequences have lists of their own, because their lengths differ. A plane is a batch entry and head that have lists of
// their own.
struct MaskIterations {
  static constexpr int kThreads = 256;  // that compute scores of an iteration
  static constexpr uint8_t kSomeTrue = 1;
  static constexpr uint8_t kSomeFalse = 2;
  static constexpr uint16_t kIsLast = 1u << 15;

  struct alignas(16) Entry {
    static constexpr int kNothingMasked = -1;

    int query_tile;
    int rank;                                   // among the contributors that are left
    bool is_last;                               // whether it is the last one of these
    bool is_hidden[LoopOrder::kKeyWarpgroups];  // whether blocks hide all keys of the warpgroup
    int mask_tile;                              // kNothingMasked: neither mask nor intervals hide anything of the tile
  };
  static_assert(sizeof(Entry) == 16);

  int key_tiles = 0;  // of the longest sequence
  int query_tiles = 0;
  int mask_query_tiles = 0;  // 1 where the mask is broadcast over queries
  int mask_heads = 0;
  int mask_batches = 0;
  int list_batches = 0;
  int intervals = 0;  // of each query
  bool has_words = false;
  int directions = 0;  // that have lists: 1, or 2 where some pairs descend
  int ctas = 0;        // of the backward kernel
  int part_sums = 0;   // for how many parts of key tiles there is room (KeyTileParts); 0: none is divided

  uint32_t* words = nullptr;
  Entry* entries = nullptr;
  int* counts = nullptr;             // iterations of each list
  int* most_contributors = nullptr;  // of a query tile
  // Of each query tile: the begins of its 64 queries' first interval, then their ends, then those of the next.
  int32_t* bounds = nullptr;
  uint8_t* descends = nullptr;  // of each plane: whether its descending pairs stay so; unset without queries
  // Of each list and query tile: the contributor's rank, with kIsLast on the last one; unset where the mask hides the
  // iteration.
  uint16_t* ranks = nullptr;
  uint8_t* tiles = nullptr;  // flags of each mask tile: kSomeTrue, kSomeFalse

  FLASH_HOST_DEVICE bool present() const { return entries != nullptr; }
  FLASH_HOST_DEVICE int64_t num_tiles() const {
    return int64_t{mask_batches} * mask_heads * key_tiles * mask_query_tiles;
  }
  FLASH_HOST_DEVICE int64_t num_lists() const { return int64_t{list_batches} * mask_heads * directions * key_tiles; }
  // Whether 32 bits hold the indices of all tiles and entries, and 15 bits hold ranks.
  static bool may_be_numbered(const attention::AttentionParams& p, const LoopOrder& order) {
    const MaskIterations iterations = of(p, order);
    return iterations.key_tiles <= kIsLast && iterations.num_tiles() <= INT32_MAX &&
           iterations.num_lists() * iterations.query_tiles <= INT32_MAX;
  }
  static int64_t bytes(const attention::AttentionParams& p, const LoopOrder& order) {
    const MaskIterations iterations = of(p, order);
    return iterations.bytes_of_words() + iterations.bytes_of_entries() + iterations.bytes_of_counts() +
           iterations.bytes_of_bounds() + iterations.bytes_of_ranks() + iterations.num_planes() +
           iterations.num_tiles();
  }

  // Places everything in bytes(p, order) of memory, which is aligned to 16 bytes.
  static MaskIterations in(void* memory, const attention::AttentionParams& p, const LoopOrder& order) {
    MaskIterations iterations = of(p, order);
    char* at = static_cast<char*>(memory);
    if (iterations.has_words) iterations.words = reinterpret_cast<uint32_t*>(at);
    iterations.bounds = reinterpret_cast<int32_t*>(at += iterations.bytes_of_words());
    iterations.entries = reinterpret_cast<Entry*>(at += iterations.bytes_of_bounds());
    iterations.counts = reinterpret_cast<int*>(at += iterations.bytes_of_entries());
    iterations.most_contributors = iterations.counts + iterations.num_lists();
    iterations.ranks = reinterpret_cast<uint16_t*>(at += iterations.bytes_of_counts());
    iterations.descends = reinterpret_cast<uint8_t*>(at += iterations.bytes_of_ranks());
    iterations.tiles = reinterpret_cast<uint8_t*>(at + iterations.num_planes());
    return iterations;
  }

  // The index of a key tile's first mask tile. A key tile's mask tiles have consecutive indices.
  FLASH_HOST_DEVICE int first_tile(int batch, int head, int key_tile) const {
    const int plane = (mask_batches == 1 ? 0 : batch) * mask_heads + (mask_heads == 1 ? 0 : head);
    return (plane * key_tiles + key_tile) * mask_query_tiles;
  }
  FLASH_HOST_DEVICE int tile(int first, int query_tile) const {
    return mask_query_tiles == 1 ? first : first + query_tile;
  }

  // The bounds of a query tile's intervals.
  FLASH_HOST_DEVICE int32_t* bounds_of(int batch, int head, int query_tile) const {
    const int64_t plane = int64_t{mask_batches == 1 ? 0 : batch} * mask_heads + (mask_heads == 1 ? 0 : head);
    return bounds + (plane * query_tiles + query_tile) * (bytes_of_query_tile() / int64_t{sizeof(int32_t)});
  }
  FLASH_HOST_DEVICE uint32_t bytes_of_query_tile() const {
    return static_cast<uint32_t>(2 * intervals * LoopOrder::kQueries) * static_cast<uint32_t>(sizeof(int32_t));
  }

  // The index of a plane.
  FLASH_HOST_DEVICE int64_t plane(int batch, int head) const {
    return int64_t{list_batches == 1 ? 0 : batch} * mask_heads + (mask_heads == 1 ? 0 : head);
  }
  FLASH_HOST_DEVICE int64_t num_planes() const { return int64_t{list_batches} * mask_heads; }
  FLASH_HOST_DEVICE int64_t list(int batch, int head, LoopDirection direction, int key_tile) const {
    return (plane(batch, head) * directions + (direction == LoopDirection::kDescending ? 1 : 0)) * key_tiles + key_tile;
  }
  // The index of the list's first entry.
  FLASH_HOST_DEVICE uint32_t first_entry(int64_t list) const { return static_cast<uint32_t>(list * query_tiles); }

  // The query tile of the i-th iteration, where the loop leaves none out.
  FLASH_HOST_DEVICE static int query_tile(const LoopOrder::Contributor& contributor,
                                          const LoopOrder::Tiles& visible_query_tiles, int i) {
    if (contributor.direction == LoopDirection::kDescending) return visible_query_tiles.end - 1 - i;
    const int at = i + (contributor.direction == LoopDirection::kCyclic ? contributor.first_of_cycle()
                                                                        : visible_query_tiles.begin);
    return at < visible_query_tiles.end ? at : at - visible_query_tiles.end + visible_query_tiles.begin;
  }

 private:
  int64_t bytes_of_words() const { return has_words ? num_tiles() * kThreads * int64_t{sizeof(uint32_t)} : 0; }
  int64_t bytes_of_bounds() const { return int64_t{mask_batches} * mask_heads * query_tiles * bytes_of_query_tile(); }
  int64_t bytes_of_entries() const { return num_lists() * query_tiles * int64_t{sizeof(Entry)}; }
  int64_t bytes_of_counts() const { return (num_lists() + 1) * int64_t{sizeof(int)}; }
  int64_t bytes_of_ranks() const { return num_lists() * query_tiles * int64_t{sizeof(uint16_t)}; }

  static MaskIterations of(const attention::AttentionParams& p, const LoopOrder& order) {
    const attention::MaskDimensions differs = p.mask_dimensions();
    MaskIterations iterations;
    iterations.key_tiles = LoopOrder::num_tiles(p.sequences.max_seqlen_k, LoopOrder::kKeys);
    iterations.query_tiles = LoopOrder::num_tiles(p.sequences.max_seqlen_q, LoopOrder::kQueries);
    iterations.mask_query_tiles = differs.queries ? iterations.query_tiles : 1;
    iterations.mask_heads = differs.heads ? static_cast<int>(p.num_heads_q) : 1;
    iterations.mask_batches = differs.batch ? static_cast<int>(p.batch) : 1;
    iterations.has_words = p.score_mod.mask.present();
    iterations.intervals = p.score_mod.intervals.count;
    iterations.list_batches = p.sequences.cu_seqlens_q != nullptr ? static_cast<int>(p.batch) : iterations.mask_batches;
    iterations.directions = order.has_descending_pairs() ? 2 : 1;
    return iterations;
  }
};

}  // namespace flash_attn_ext
