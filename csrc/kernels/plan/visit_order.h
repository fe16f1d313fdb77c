// In which order a resident block takes tiles of keys, and in which order these add to dQ.
//
// A tile of keys visits the tiles of queries that see it. The visitors of a tile of queries add to its dQ in a fixed
// order, so that gradients repeat bit for bit: a visitor waits until those before it are done. The order keeps waits
// short, and is free of deadlock: a tile waits only for tiles that were claimed before it, or, where tiles go round,
// for those of its group, all of which resident blocks hold together.
//
// Pairs of a batch entry and a key head are worked on in sections. Where members of the key head's group have claims of
// their own, each makes a pair, and their dK and dV are added up. Where a pair has phases, tile j belongs to phase j
// mod 2^n.
//
//   climb     from the first tile of queries to the last, claimed last tile of keys first. Causal tiles start together,
//             each two tiles of queries behind the one before it, and end staggered.
//   descend   the other way round: they start staggered, where climbing ones end, and end together. Every second pair.
//   cycle     where every query sees every key: the tiles of a phase start evenly spread and go round. The more phases
//             there are, the further apart neighbouring visitors of a tile of queries come.
//   divide    few queries that see many keys: each phase adds to sums of its own, and these are added up afterwards.
//             Tiles of all pairs come in turn, so that the visitors of a phase are claimed far apart.
#pragma once

#include <cstdint>

#include "attention/host_device.h"
#include "attention/params.h"

namespace flash_attn_ext {

enum class Walk : int { kClimb, kDescend, kCycle, kDivide };

struct VisitOrder {
  static constexpr int kKeys = 128;           // rows of a tile of keys
  static constexpr int kQueries = 64;         // and of queries
  static constexpr int kParts = 2;            // of a tile of keys, 64 each
  static constexpr int64_t kWorkBytes = 112;  // of what a kernel is told about a tile of keys

  uint32_t pairs = 0;    // (batch entry * key heads + key head) * members + member
  uint32_t members = 1;  // shares of a key head's group of query heads
  uint32_t tiles = 0;    // of keys, of the longest sequence
  uint32_t log2_phases = 0;
  uint32_t group = 0;     // tiles of a pair and a phase, at most
  uint32_t together = 0;  // pairs of a section
  bool cyclic = false;
  bool divided = false;
  uint32_t log2_sums = 0;  // sums of dQ that a tile of queries has, as a power of two: one, or where divided, phases

  FLASH_HOST_DEVICE uint32_t num_claims() const { return (pairs * group) << log2_phases; }

  // The number of the sums that a phase adds to, of the tile of queries with a number.
  FLASH_HOST_DEVICE int sums_of(int query_tile, int phase) const {
    return divided ? (query_tile << log2_sums) + phase : query_tile;
  }

  // What is claimed index-th. The last phases and short sequences lack some of these tiles.
  struct Claim {
    uint32_t pair;
    int tile;
    Walk walk;
    uint32_t group_end;  // cycle: the first claim behind the group's
  };
  FLASH_HOST_DEVICE Claim claim(uint32_t index) const {
    if (divided) {
      const uint32_t tile = index / pairs;
      return {index - tile * pairs, static_cast<int>(tile), Walk::kDivide, 0};
    }
    const uint32_t of_section = (together * group) << log2_phases;
    const uint32_t section = index / of_section;
    const uint32_t first_pair = section * together;
    const uint32_t count = pairs - first_pair < together ? pairs - first_pair : together;
    const uint32_t in_section = index - section * of_section;
    if (cyclic) {
      const uint32_t phase = in_section / (count * group);
      const uint32_t in_phase = in_section - phase * count * group;
      const uint32_t pair = in_phase / group;
      const uint32_t k = in_phase - pair * group;
      return {first_pair + pair, static_cast<int>(phase + (k << log2_phases)), Walk::kCycle, index - k + group};
    }
    const uint32_t climbing = (count + 1) / 2;
    if (in_section < climbing * tiles) {
      const uint32_t k = in_section / climbing;
      return {first_pair + 2 * (in_section - k * climbing), static_cast<int>(tiles - 1 - k), Walk::kClimb, 0};
    }
    const uint32_t descending = count - climbing;
    const uint32_t behind_climbing = in_section - climbing * tiles;
    const uint32_t k = behind_climbing / descending;
    return {first_pair + 2 * (behind_climbing - k * descending) + 1, static_cast<int>(k), Walk::kDescend, 0};
  }

  FLASH_HOST_DEVICE static int num_tiles(int64_t rows, int tile_rows) {
    return static_cast<int>(static_cast<uint32_t>(rows + tile_rows - 1) / static_cast<uint32_t>(tile_rows));
  }

  // Tiles [begin, end).
  struct Tiles {
    int begin;
    int end;
    FLASH_HOST_DEVICE bool empty() const { return end <= begin; }
  };

  // The tiles of queries that see something of a tile of keys, which the sequence has.
  FLASH_HOST_DEVICE static Tiles visited(const attention::Visibility& visibility, const attention::Sequence& sequence,
                                         int tile) {
    const int first = tile * kKeys;
    const int last = least(first + kKeys, sequence.num_keys) - 1;
    const int begin = static_cast<int>(visibility.queries_of<int>(first, sequence).begin);
    const int end = static_cast<int>(visibility.queries_of<int>(last, sequence).end);
    return tiles_of(begin, end, kQueries);
  }

  // A tile of keys, and what its places follow from: in 32-bit numbers, for a thread of few registers.
  struct Visitor {
    int tile;
    Walk walk;
    int log2_phases;
    int num_keys;  // of the sequence
    int num_queries;
    int begin_offset;  // from a query to the first key that it sees
    int end_offset;    // from a query to the key behind the last one that the query before it sees

    // The tiles of keys that a tile of queries, which the sequence has, sees something of.
    FLASH_HOST_DEVICE Tiles visitors(int query_tile) const {
      if (walk == Walk::kCycle) return {0, num_tiles(num_keys, kKeys)};
      const int first = query_tile * kQueries;
      return tiles_of(clamp(first + begin_offset), clamp(least(first + kQueries, num_queries) + end_offset), kKeys);
    }

    FLASH_HOST_DEVICE int phase() const { return tile & ((1 << log2_phases) - 1); }

    // How many of those that add to the same sums of a tile of queries come before this visitor.
    FLASH_HOST_DEVICE int place(int query_tile, const Tiles& visitors) const {
      if (walk == Walk::kClimb) return visitors.end - 1 - tile;
      if (walk == Walk::kDescend) return tile - visitors.begin;
      const int phase = this->phase();
      if (walk == Walk::kDivide) return in_phase(tile, phase) - in_phase(visitors.begin, phase);
      // The one that started here or last before comes first, then those that have come further.
      const int count = in_phase(visitors.end, phase);
      const auto queries = static_cast<uint32_t>(num_tiles(num_queries, kQueries));
      const auto started =
          (static_cast<uint32_t>(query_tile + 1) * static_cast<uint32_t>(count) + queries - 1) / queries;
      const int behind = static_cast<int>(started) - 1 - (tile >> log2_phases);
      return in_phases_before(visitors.end, phase) + (behind < 0 ? behind + count : behind);
    }

    // Where it begins to go round.
    FLASH_HOST_DEVICE int first_of_cycle() const {
      const int count = in_phase(num_tiles(num_keys, kKeys), phase());
      return static_cast<int>(static_cast<uint32_t>(tile >> log2_phases) *
                              static_cast<uint32_t>(num_tiles(num_queries, kQueries)) / static_cast<uint32_t>(count));
    }

   private:
    FLASH_HOST_DEVICE int clamp(int key) const { return key < 0 ? 0 : key < num_keys ? key : num_keys; }
    // Of the tiles [0, end): those of a phase, and of the phases before it.
    FLASH_HOST_DEVICE int in_phase(int end, int phase) const {
      return (end + (1 << log2_phases) - 1 - phase) >> log2_phases;
    }
    FLASH_HOST_DEVICE int in_phases_before(int end, int phase) const {
      const int rest = end & ((1 << log2_phases) - 1);
      return phase * (end >> log2_phases) + (rest < phase ? rest : phase);
    }
  };

  FLASH_HOST_DEVICE Visitor visitor(const attention::Visibility& visibility, const attention::Sequence& sequence,
                                    int tile, Walk walk) const {
    const auto diagonal = static_cast<int>(visibility.diagonal(sequence));
    return {tile,
            walk,
            static_cast<int>(log2_phases),
            static_cast<int>(sequence.num_keys),
            static_cast<int>(sequence.num_queries),
            diagonal - static_cast<int>(visibility.left),
            diagonal + static_cast<int>(visibility.right)};
  }

 private:
  FLASH_HOST_DEVICE static int least(int64_t x, int64_t y) { return static_cast<int>(x < y ? x : y); }
  FLASH_HOST_DEVICE static Tiles tiles_of(int begin, int end, int tile_rows) {
    const int first = static_cast<int>(static_cast<uint32_t>(begin) / static_cast<uint32_t>(tile_rows));
    return {first, begin < end ? num_tiles(end, tile_rows) : first};
  }
};

}  // namespace flash_attn_ext
