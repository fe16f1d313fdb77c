// Which keys a query sees, as an interval: begin(q) <= k < end(q).
//
// Causal masks (both alignments), sliding windows, ragged lengths and padding tails are all this one interval. Both of
// its ends never decrease with q, so the keys that a tile of queries sees are an interval too, and so is the inverse:
// the queries that see a key.
#pragma once

#include <cstdint>

#include "attention/host_device.h"
#include "attention/sequence.h"

namespace flash_attn_ext::attention {

struct Interval {
  int64_t begin;
  int64_t end;  // exclusive; an empty interval has end <= begin
  FLASH_HOST_DEVICE bool empty() const { return end <= begin; }
};

enum class TileCoverage {
  kNone,     // no query of the tile sees a key of it: skipped, never loaded
  kFull,     // every query sees every key: no comparison
  kPartial,  // compared element by element
};

struct Visibility {
  // Far beyond any length, and small enough that sums of a few of them do not overflow.
  static constexpr int64_t kUnbounded = int64_t{1} << 60;

  int64_t left = kUnbounded;   // how many keys before its diagonal key a query sees
  int64_t right = kUnbounded;  // and how many after it; causal attention is right = 0
  bool top_left = false;       // the diagonal key of query 0 is key 0; else the last query's is the last key

  // Key index minus query index on the diagonal.
  FLASH_HOST_DEVICE int64_t diagonal(const Sequence& sequence) const {
    return top_left ? 0 : sequence.num_keys - sequence.num_queries;
  }

  FLASH_HOST_DEVICE Interval keys_of(int64_t query, const Sequence& sequence) const {
    const int64_t center = query + diagonal(sequence);
    return clamped(center - left, center + right + 1, sequence.num_keys);
  }

  FLASH_HOST_DEVICE Interval queries_of(int64_t key, const Sequence& sequence) const {
    const int64_t center = key - diagonal(sequence);
    return clamped(center - right, center + left + 1, sequence.num_queries);
  }

  // The union of keys_of over queries [queries.begin, queries.end), which must not be empty.
  FLASH_HOST_DEVICE Interval keys_of_tile(const Interval& queries, const Sequence& sequence) const {
    return {keys_of(queries.begin, sequence).begin, keys_of(queries.end - 1, sequence).end};
  }

  FLASH_HOST_DEVICE Interval queries_of_tile(const Interval& keys, const Sequence& sequence) const {
    return {queries_of(keys.begin, sequence).begin, queries_of(keys.end - 1, sequence).end};
  }

  FLASH_HOST_DEVICE TileCoverage coverage(const Interval& queries, const Interval& keys,
                                          const Sequence& sequence) const {
    const Interval first = keys_of(queries.begin, sequence);
    const Interval last = keys_of(queries.end - 1, sequence);
    if (last.end <= keys.begin || keys.end <= first.begin) return TileCoverage::kNone;
    // The last query has the largest begin and the first one the smallest end.
    if (last.begin <= keys.begin && keys.end <= first.end) return TileCoverage::kFull;
    return TileCoverage::kPartial;
  }

 private:
  FLASH_HOST_DEVICE static Interval clamped(int64_t begin, int64_t end, int64_t length) {
    begin = begin < 0 ? 0 : begin;
    end = end > length ? length : end;
    // Both ends stay inside [0, length] also where nothing is seen, so that unions of neighbours stay right.
    return {begin > length ? length : begin, end < 0 ? 0 : end};
  }
};

}  // namespace flash_attn_ext::attention
