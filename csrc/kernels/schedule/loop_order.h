// The loop order of the key-stationary backward pass on Hopper: in which order persistent CTAs fetch key tiles, in
// which order a key tile iterates over query tiles, and in which order the partial dQ of key tiles are added.
//
// As in FlashAttention-3's deterministic backward pass, a CTA holds a key tile, and iterates over the query tiles that
// see it. In each (query tile, key tile) iteration it adds a partial dQ to a float32 accumulator in memory.
// Floating-point addition is not associative, so gradients are bitwise reproducible only if the order of these
// additions is fixed:
//
//  contributor  a key tile, for each query tile that sees it
//  rank         the contributor's position in the order in which a query tile's contributors add
//  semaphore    a counter for each accumulator (FlashAttention-3's dq_semaphore): how many contributors have added
//
// A contributor waits until the semaphore has reached its rank, adds its partial dQ, and raises the semaphore by one.
// Two things differ from FlashAttention-3. First, the contributor of rank 0 stores its partial dQ instead of adding it,
// and the last one adds the accumulator to its own partial dQ and writes dQ in the element type. So no kernel clears
// the accumulators before, and none converts them afterwards. Second, the loop order below determines the ranks: key
// tiles that run at the same time are at different query tiles, each following the contributor of the rank before, so
// that waits are short.
//
// A wait never deadlocks. A key tile waits only for key tiles that were fetched before it, which some CTA holds or has
// finished. In cyclic order it may wait for any tile of its pair and phase, and so all of these are co-resident: the
// launch is cooperative, and a CTA that holds such a tile fetches no other one before all of them are fetched.
//
// A work tile is a key tile of a pair. A pair is a batch entry and a key head. Where a KV group is divided into shares,
// each share makes a pair of its own, and the partial dK and dV of the shares are summed (key_epilogue.cuh). A share
// has some of the query heads, or in cyclic order some of the query tiles of all of them. Pairs are scheduled in L2
// head groups, one group after the other. A group has more pairs where a mask makes key tiles wait for each other.
// Where a pair has phases, key tile j belongs to phase j mod 2^n, and in cyclic order the phases run one after the
// other.
//
//  ascending   From the first query tile that sees the key tile to the last; the last key tile is fetched first. Causal
//              key tiles start together, each two query tiles after the one that was fetched before it, and end
//              staggered.
//  descending  From the last query tile to the first; the first key tile is fetched first. Causal key tiles start
//              staggered and end together. Every second pair of an L2 head group is descending: its staggered start
//              fills the SMs that the staggered end of the ascending pairs leaves idle. In windows of grouped heads
//              no pair is, because each group of key tiles that see the same queries would have a staggered start; nor
//              is one where the last query tile sees few key tiles through a mask (KeyTileList::directed).
//  cyclic      Where every query sees every key: the key tiles of a phase start evenly spread over the query tiles and
//              wrap around. More phases put neighbouring contributors of a query tile further apart. Not with
//              intervals, since a phase would take as long as the key tile that the most queries see.
//  split-KV    For few queries that see many keys, where a query tile would have too many contributors at once for one
//              semaphore (kSplitKv): each phase adds to an accumulator of its own, and dq_sums.cuh sums these in a
//              fixed order. The tiles of all pairs alternate, so that contributors of a phase are fetched far apart.
#pragma once

#include <cstdint>

#include "attention/division.h"
#include "attention/host_device.h"
#include "attention/params.h"

namespace flash_attn_ext {

enum class LoopDirection : int { kAscending, kDescending, kCyclic, kSplitKv };

struct LoopOrder {
  static constexpr int kKeys = 128;           // keys of a key tile
  static constexpr int kQueries = 64;         // queries of a query tile
  static constexpr int kKeyWarpgroups = 2;    // of a CTA; each has 64 keys of the key tile
  static constexpr int64_t kWorkBytes = 112;  // of a KeyTileWork, which describes a key tile to a kernel

  uint32_t pairs = 0;            // numbered (batch entry * key heads + key head) * kv_group_shares + share
  uint32_t kv_group_shares = 1;  // into which a KV group is divided: its query heads, or in cyclic order query tiles
  uint32_t tiles = 0;            // key tiles of the longest sequence
  uint32_t log2_phases = 0;
  uint32_t phase_tiles = 0;       // key tiles of a pair and a phase, at most
  uint32_t head_group_pairs = 0;  // pairs of an L2 head group
  bool cyclic = false;
  bool split_kv = false;
  // head_group_pairs where a mask makes key tiles wait for each other (is_sparse, has_long_queue); 0: the same as
  // otherwise.
  uint16_t waiting_group_pairs = 0;
  uint32_t log2_accumulators = 0;  // accumulators of dQ for each query tile: one, or in split-KV one for each phase

  // The number of leading key tiles that have work tiles, for each loop direction.
  struct KeyTiles {
    uint32_t ascending;
    uint32_t descending;
  };
  FLASH_HOST_DEVICE uint32_t num_work_tiles() const { return (pairs * phase_tiles) << log2_phases; }
  // The same for the first `count` pairs, of which only some key tiles have work tiles.
  FLASH_HOST_DEVICE uint32_t num_work_tiles(uint32_t count, const KeyTiles& of_direction) const {
    if (cyclic || split_kv) return (count * phase_tiles) << log2_phases;
    return (count + 1) / 2 * of_direction.ascending + count / 2 * of_direction.descending;
  }

  // Whether lists of blocks leave so few of the `visible` iterations that key tiles of a pair reach a query tile in no
  // order, and wait for each other.
  FLASH_HOST_DEVICE static bool is_sparse(uint32_t iterations, uint32_t visible) {
    return 8 * int64_t{iterations} <= 3 * int64_t{visible};
  }
  // What intervals or a mask leave of a head.
  struct Head {
    int64_t iterations;
    int64_t query_tiles;
    int64_t most_contributors;  // of a query tile
  };
  // Whether one query tile has so many more contributors than the others that CTAs mostly wait for its dQ semaphore,
  // at which contributors follow each other in about the time of an iteration. Under causality a query tile has up to
  // twice as many as on average. heads: of a pair, one after the other.
  FLASH_HOST_DEVICE static bool has_long_queue(const Head& head, int64_t heads, int64_t ctas) {
    return head.most_contributors * head.query_tiles >= 4 * head.iterations &&
           head.most_contributors * ctas >= 2 * head.iterations * heads;
  }
  // The order of the same work tiles in these cases. It changes no rank: the tiles of a pair keep their order.
  FLASH_HOST_DEVICE LoopOrder with_larger_groups() const {
    LoopOrder order = *this;
    order.head_group_pairs = waiting_group_pairs;
    return order;
  }

  FLASH_HOST_DEVICE bool has_descending_pairs() const { return !cyclic && !split_kv && head_group_pairs > 1; }

  // The index of the accumulator that a phase adds to, from the query tile's index.
  FLASH_HOST_DEVICE int accumulator_of(int query_tile, int phase) const {
    return split_kv ? (query_tile << log2_accumulators) + phase : query_tile;
  }

  // The work tile that is fetched index-th. The last phases and short sequences lack some of these tiles.
  struct WorkTile {
    uint32_t pair;
    int tile;
    LoopDirection direction;
    uint32_t phase_end;  // cyclic: one past the last index of the pair and phase
  };
  FLASH_HOST_DEVICE WorkTile work_tile(uint32_t index) const { return work_tile(index, {tiles, tiles}); }
  // The work tile that a descending pair fetches in its place, if the pair is ascending.
  FLASH_HOST_DEVICE WorkTile ascending(const WorkTile& descending) const {
    return {descending.pair, static_cast<int>(tiles) - 1 - descending.tile, LoopDirection::kAscending, 0};
  }
  FLASH_HOST_DEVICE WorkTile work_tile(uint32_t index, const KeyTiles& of_direction) const {
    if (split_kv) {
      const uint32_t tile = index / pairs;
      return {index - tile * pairs, static_cast<int>(tile), LoopDirection::kSplitKv, 0};
    }
    const uint32_t of_head_group = num_work_tiles(head_group_pairs, of_direction);
    const uint32_t head_group = index / of_head_group;
    const uint32_t first_pair = head_group * head_group_pairs;
    const uint32_t count = pairs - first_pair < head_group_pairs ? pairs - first_pair : head_group_pairs;
    const uint32_t in_head_group = index - head_group * of_head_group;
    if (cyclic) {
      const uint32_t phase = in_head_group / (count * phase_tiles);
      const uint32_t in_phase = in_head_group - phase * count * phase_tiles;
      const uint32_t pair = in_phase / phase_tiles;
      const uint32_t k = in_phase - pair * phase_tiles;
      return {first_pair + pair, static_cast<int>(phase + (k << log2_phases)), LoopDirection::kCyclic,
              index - k + phase_tiles};
    }
    const uint32_t ascending = (count + 1) / 2;
    if (in_head_group < ascending * of_direction.ascending) {
      const uint32_t k = in_head_group / ascending;
      return {first_pair + 2 * (in_head_group - k * ascending), static_cast<int>(of_direction.ascending - 1 - k),
              LoopDirection::kAscending, 0};
    }
    const uint32_t descending = count - ascending;
    const uint32_t behind_ascending = in_head_group - ascending * of_direction.ascending;
    const uint32_t k = behind_ascending / descending;
    return {first_pair + 2 * (behind_ascending - k * descending) + 1, static_cast<int>(k), LoopDirection::kDescending,
            0};
  }

  FLASH_HOST_DEVICE static int num_tiles(int64_t rows, int tile_rows) {
    return static_cast<int>(attention::ceil_div(static_cast<uint32_t>(rows), static_cast<uint32_t>(tile_rows)));
  }

  // Tiles [begin, end).
  struct Tiles {
    int begin;
    int end;
    FLASH_HOST_DEVICE bool empty() const { return end <= begin; }
  };

  // The query tiles that see something of a key tile. The sequence must have the key tile.
  FLASH_HOST_DEVICE static Tiles visible_query_tiles(const attention::Visibility& visibility,
                                                     const attention::Sequence& sequence, int tile) {
    const int first = tile * kKeys;
    const int last = least(first + kKeys, sequence.num_keys) - 1;
    const int begin = static_cast<int>(visibility.queries_of<int>(first, sequence).begin);
    const int end = static_cast<int>(visibility.queries_of<int>(last, sequence).end);
    return tiles_of(begin, end, kQueries);
  }

  // A key tile, and what its ranks follow from. It has 32-bit numbers, because the producer thread has few registers.
  struct Contributor {
    int tile;
    LoopDirection direction;
    int log2_phases;
    int num_keys;  // of the sequence
    int num_queries;
    union {
      int begin_offset;      // from a query to the first key that it sees
      int first_query_tile;  // cyclic: of the share
    };
    union {
      int end_offset;   // from a query to one past the last key that the query before it sees
      int query_tiles;  // cyclic: of the share
    };

    // The contributors of a query tile: the key tiles of which it sees something. The sequence must have the query
    // tile.
    FLASH_HOST_DEVICE Tiles contributors(int query_tile) const {
      if (direction == LoopDirection::kCyclic) return {0, num_tiles(num_keys, kKeys)};
      const int first = query_tile * kQueries;
      return tiles_of(clamp(first + begin_offset), clamp(least(first + kQueries, num_queries) + end_offset), kKeys);
    }

    FLASH_HOST_DEVICE int phase() const { return tile & ((1 << log2_phases) - 1); }

    // The contributor's rank: how many others add to the same accumulator of the query tile before it.
    FLASH_HOST_DEVICE int rank(int query_tile, const Tiles& contributors) const {
      if (direction == LoopDirection::kAscending) return contributors.end - 1 - tile;
      if (direction == LoopDirection::kDescending) return tile - contributors.begin;
      const int phase = this->phase();
      if (direction == LoopDirection::kSplitKv) return in_phase(tile, phase) - in_phase(contributors.begin, phase);
      // The key tile that starts at this query tile, or at the nearest one before it, comes first. Those that start
      // further back follow, and wrap around.
      const int count = in_phase(contributors.end, phase);
      const int behind = started(query_tile, count) - 1 - (tile >> log2_phases);
      return in_phases_before(contributors.end, phase) + (behind < 0 ? behind + count : behind);
    }

    // The contributor that has a rank, the inverse of rank(). Not in split-KV.
    FLASH_HOST_DEVICE int key_tile_of_rank(int query_tile, const Tiles& contributors, int rank) const {
      if (direction == LoopDirection::kAscending) return contributors.end - 1 - rank;
      if (direction == LoopDirection::kDescending) return contributors.begin + rank;
      int phase = 0;
      while (in_phases_before(contributors.end, phase + 1) <= rank) ++phase;
      const int count = in_phase(contributors.end, phase);
      const int behind = rank - in_phases_before(contributors.end, phase);
      const int index = started(query_tile, count) - 1 - behind;
      return ((index < 0 ? index + count : index) << log2_phases) + phase;
    }

    // The query tile at which the cyclic loop starts.
    FLASH_HOST_DEVICE int first_of_cycle() const {
      const int count = in_phase(num_tiles(num_keys, kKeys), phase());
      return first_query_tile + static_cast<int>(static_cast<uint32_t>(tile >> log2_phases) *
                                                 static_cast<uint32_t>(query_tiles) / static_cast<uint32_t>(count));
    }

   private:
    // How many of a phase's `count` key tiles start at this query tile or before it.
    FLASH_HOST_DEVICE int started(int query_tile, int count) const {
      const auto tiles = static_cast<uint32_t>(query_tile - first_query_tile + 1);
      return static_cast<int>(
          attention::ceil_div(tiles * static_cast<uint32_t>(count), static_cast<uint32_t>(query_tiles)));
    }
    FLASH_HOST_DEVICE int clamp(int key) const { return key < 0 ? 0 : key < num_keys ? key : num_keys; }
    // Of the key tiles [0, end): how many are in a phase, and how many in the phases before it.
    FLASH_HOST_DEVICE int in_phase(int end, int phase) const {
      return (end + (1 << log2_phases) - 1 - phase) >> log2_phases;
    }
    FLASH_HOST_DEVICE int in_phases_before(int end, int phase) const {
      const int rest = end & ((1 << log2_phases) - 1);
      return phase * (end >> log2_phases) + (rest < phase ? rest : phase);
    }
  };

  // share: of the KV group.
  FLASH_HOST_DEVICE Contributor contributor(const attention::Visibility& visibility,
                                            const attention::Sequence& sequence, int tile, LoopDirection direction,
                                            int share = 0) const {
    Contributor contributor = {};
    contributor.tile = tile;
    contributor.direction = direction;
    contributor.log2_phases = static_cast<int>(log2_phases);
    contributor.num_keys = static_cast<int>(sequence.num_keys);
    contributor.num_queries = static_cast<int>(sequence.num_queries);
    if (direction == LoopDirection::kCyclic) {
      const Tiles of_share = query_tiles_of_share(num_tiles(sequence.num_queries, kQueries), share);
      contributor.first_query_tile = of_share.begin;
      contributor.query_tiles = of_share.end - of_share.begin;
    } else {
      const auto diagonal = static_cast<int>(visibility.diagonal(sequence));
      contributor.begin_offset = diagonal - static_cast<int>(visibility.left);
      contributor.end_offset = diagonal + static_cast<int>(visibility.right);
    }
    return contributor;
  }

  // Whether shares have query tiles instead of query heads.
  FLASH_HOST_DEVICE bool shares_query_tiles() const { return cyclic && kv_group_shares > 1; }
  // How many of a KV group's query heads a share has.
  FLASH_HOST_DEVICE int heads_of_share(int group) const {
    return cyclic ? group : group / static_cast<int>(kv_group_shares);
  }
  // Which of a head's query tiles a share has.
  FLASH_HOST_DEVICE Tiles query_tiles_of_share(int tiles, int share) const {
    if (!cyclic) return {0, tiles};
    const auto first = [&](int i) {
      return static_cast<int>(uint64_t{static_cast<uint32_t>(tiles)} * static_cast<uint32_t>(i) / kv_group_shares);
    };
    return {first(share), first(share + 1)};
  }

 private:
  FLASH_HOST_DEVICE static int least(int64_t x, int64_t y) { return static_cast<int>(x < y ? x : y); }
  FLASH_HOST_DEVICE static Tiles tiles_of(int begin, int end, int tile_rows) {
    const int first = static_cast<int>(static_cast<uint32_t>(begin) / static_cast<uint32_t>(tile_rows));
    return {first, begin < end ? num_tiles(end, tile_rows) : first};
  }
};

}  // namespace flash_attn_ext
