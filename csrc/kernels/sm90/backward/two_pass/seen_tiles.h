// Which tiles of P and dS have something visible in them. The kernel that writes the tiles and those that read them
// have to agree on it, and so share this file.
#pragma once

#include "attention/visibility.h"
#include "kernels/schedule/head_tiles.h"
#include "kernels/schedule/materialised_tiles.h"

namespace flash_attn_ext::sm90 {

// The tiles of a sequence. Numbers have 32 bits, because producer threads have few registers.
struct SeenTiles {
  static constexpr int kRows = MaterialisedTiles::kRows;

  int num_queries;
  int num_keys;
  int before;               // query q sees keys from q + before
  int after;                // up to q + after
  int key_chunk_begin = 0;  // the key tiles of the launch
  int key_chunk_end = INT32_MAX;

  FLASH_HOST_DEVICE static SeenTiles of(const attention::Visibility& visibility, const attention::Sequence& sequence,
                                        const MaterialisedTiles& launch) {
    const auto diagonal = static_cast<int>(visibility.diagonal(sequence));
    return {static_cast<int>(sequence.num_queries),
            static_cast<int>(sequence.num_keys),
            diagonal - static_cast<int>(visibility.left),
            diagonal + static_cast<int>(visibility.right),
            launch.key_chunk_begin,
            launch.key_chunk_end};
  }

  // The launch's key tiles of which a query tile sees something.
  FLASH_HOST_DEVICE TileRange keys_of(int query_tile) const {
    const int first = query_tile * kRows;
    const int last = least(first + kRows, num_queries) - 1;
    if (first > last) return {0, 0, 0, 0};
    TileRange seen = tiles_of({first + before, first + after + 1}, {last + before, last + after + 1}, num_keys);
    seen.begin = seen.begin > key_chunk_begin ? seen.begin : key_chunk_begin;
    seen.end = least(seen.end, key_chunk_end);
    return seen;
  }

  // The query tiles that see something of a key tile of the launch: those whose keys_of contains it.
  FLASH_HOST_DEVICE TileRange queries_of(int key_tile) const {
    const int first = key_tile * kRows;
    const int last = least(first + kRows, num_keys) - 1;
    if (first > last) return {0, 0, 0, 0};
    return tiles_of({first - after, first - before + 1}, {last - after, last - before + 1}, num_queries);
  }

 private:
  struct Span {
    int begin;
    int end;
  };

  // Does the same as tile_range.
  FLASH_HOST_DEVICE static TileRange tiles_of(const Span& first, const Span& last, int length) {
    const auto clamped = [&](int x) { return static_cast<uint32_t>(x < 0 ? 0 : least(x, length)); };
    const auto tile = [](uint32_t x) { return static_cast<int>(x / kRows); };
    const uint32_t seen_begin = clamped(first.begin);
    const uint32_t seen_end = clamped(last.end);
    const int begin = tile(seen_begin);
    return {.begin = begin,
            .end = seen_begin < seen_end ? tile(seen_end + kRows - 1) : begin,
            .full_begin = tile(clamped(last.begin) + kRows - 1),
            .full_end = tile(clamped(first.end))};
  }
  FLASH_HOST_DEVICE static int least(int x, int y) { return x < y ? x : y; }
};

// The smallest range that contains both. It has no full tiles.
FLASH_HOST_DEVICE TileRange joined(const TileRange& a, const TileRange& b) {
  if (a.empty()) return b;
  if (b.empty()) return a;
  return {a.begin < b.begin ? a.begin : b.begin, a.end > b.end ? a.end : b.end, 0, 0};
}

}  // namespace flash_attn_ext::sm90
