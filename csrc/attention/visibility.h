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

// The columns that the rows of a tile see, relative to the tile's first element: `row` sees columns [begin + row,
// min(end + row, length)). The three numbers are small and the same for the whole tile.
struct Band {
  int begin;
  int end;
  int length;

  FLASH_HOST_DEVICE int first_column(int row) const { return begin + row; }
  FLASH_HOST_DEVICE int end_column(int row) const { return end + row < length ? end + row : length; }
};

// The most tokens of a sequence. Sums of three such numbers fit 32 bits.
inline constexpr int64_t kLongestSequence = int64_t{1} << 29;

struct Visibility {
  static constexpr int64_t kUnbounded = kLongestSequence;

  int64_t left = kUnbounded;   // how many keys before its diagonal key a query sees
  int64_t right = kUnbounded;  // and how many after it; causal attention is right = 0
  bool top_left = false;       // the diagonal key of query 0 is key 0; else the last query's is the last key

  // Whether one side is bounded and the other is not, as in causal attention or its mirror image. Later queries then
  // see ever more keys, or ever fewer.
  FLASH_HOST_DEVICE bool one_sided() const { return (left == kUnbounded) != (right == kUnbounded); }

  // Whether every query sees every key.
  FLASH_HOST_DEVICE bool unlimited() const { return left == kUnbounded && right == kUnbounded; }

  // Key index minus query index on the diagonal.
  FLASH_HOST_DEVICE int64_t diagonal(const Sequence& sequence) const {
    return top_left ? 0 : sequence.num_keys - sequence.num_queries;
  }

  // Index is the type of the computation. 32 bits hold sums of three lengths, whereas each 64-bit operation takes a GPU
  // two instructions and pairs of registers.
  template <class Index = int64_t>
  FLASH_HOST_DEVICE Interval keys_of(int64_t query, const Sequence& sequence) const {
    return around<Index>(query + diagonal(sequence), {left, right}, sequence.num_keys);
  }

  template <class Index = int64_t>
  FLASH_HOST_DEVICE Interval queries_of(int64_t key, const Sequence& sequence) const {
    return around<Index>(key - diagonal(sequence), {right, left}, sequence.num_queries);
  }

  // keys_of for the rows of a tile whose first element is (query, key). queries_of_rows is for tiles whose rows are
  // keys.
  FLASH_HOST_DEVICE Band keys_of_rows(int64_t query, int64_t key, const Sequence& sequence) const {
    const int64_t center = query + diagonal(sequence) - key;
    return {small(center - left), small(center + right + 1), small(sequence.num_keys - key)};
  }
  FLASH_HOST_DEVICE Band queries_of_rows(int64_t key, int64_t query, const Sequence& sequence) const {
    const int64_t center = key - diagonal(sequence) - query;
    return {small(center - right), small(center + left + 1), small(sequence.num_queries - query)};
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
  // Saturates x far beyond the size of any tile.
  FLASH_HOST_DEVICE static int small(int64_t x) {
    constexpr int64_t kLimit = int64_t{1} << 20;
    return static_cast<int>(x < -kLimit ? -kLimit : x > kLimit ? kLimit : x);
  }

  // How far an interval reaches before and after its center.
  struct Reach {
    int64_t before;
    int64_t after;
  };
  template <class Index>
  FLASH_HOST_DEVICE static Interval around(int64_t at, const Reach& reach, int64_t num_columns) {
    const auto center = static_cast<Index>(at);
    const auto length = static_cast<Index>(num_columns);
    Index begin = center - static_cast<Index>(reach.before);
    Index end = center + static_cast<Index>(reach.after) + 1;
    begin = begin < 0 ? 0 : begin;
    end = end > length ? length : end;
    // Both ends stay inside [0, length] even if the interval is empty, so that unions of neighbours stay correct.
    return {begin > length ? length : begin, end < 0 ? 0 : end};
  }
};

}  // namespace flash_attn_ext::attention
