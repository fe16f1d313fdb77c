// The intervals of a tile's 64 queries in shared memory, and what they leave of a tile of keys.
//
// Most tiles of keys lie outside all intervals, or inside one interval of every query. The smallest and the largest of
// the 64 begins and ends tell that. The other tiles look at each query.
#pragma once

#include <climits>

#include "attention/params.h"
#include "attention/score_mod.h"

namespace flash_attn_ext::common {

struct IntervalRows {
  static constexpr int kQueries = static_cast<int>(attention::MaskTiles::kSize);
  static constexpr int kMost = attention::RowIntervals::kMost;

  struct Extremes {
    int first_begin;
    int last_begin;
    int first_end;
    int last_end;
  };

  int begins[kMost][kQueries];
  int ends[kMost][kQueries];
  Extremes extremes[kMost];
  int rows;  // that exist
  int count;

  // Called by all threads of a CTA, which has a warp for each interval at least. Synchronises them.
  __device__ __forceinline__ void load(const attention::AttentionParams& p, const attention::Sequence& sequence,
                                       int head, int first_query) {
    const attention::RowIntervals& intervals = p.score_mod.intervals;
    const auto num_keys = static_cast<int>(sequence.num_keys);
    const int found = max(0, min(kQueries, static_cast<int>(sequence.num_queries) - first_query));
    if (threadIdx.x == 0) {
      rows = found;
      count = intervals.count;
    }
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (warp < intervals.count) {
      Extremes own = {INT_MAX, 0, INT_MAX, 0};
      for (int row = lane; row < found; row += 32) {
        const int32_t* ends_of_row = intervals.row(sequence, head, first_query + row) + 2 * warp;
        int begin = max(ends_of_row[0], 0);
        int end = min(ends_of_row[1], num_keys);
        if (begin >= end) {  // empty
          begin = num_keys;
          end = 0;
        }
        begins[warp][row] = begin;
        ends[warp][row] = end;
        own = {min(own.first_begin, begin), max(own.last_begin, begin), min(own.first_end, end),
               max(own.last_end, end)};
      }
      own = {__reduce_min_sync(0xFFFFFFFFu, own.first_begin), __reduce_max_sync(0xFFFFFFFFu, own.last_begin),
             __reduce_min_sync(0xFFFFFFFFu, own.first_end), __reduce_max_sync(0xFFFFFFFFu, own.last_end)};
      if (lane == 0) extremes[warp] = own;
    }
    __syncthreads();
  }

  // No query sees a key of [end_before(key), key). 0: nor any key before these.
  __device__ __forceinline__ int end_before(int key) const {
    int end = 0;
#pragma unroll 1
    for (int m = 0; m < count; ++m) {
      if (extremes[m].first_begin < key) end = max(end, min(extremes[m].last_end, key));
    }
    return end;
  }

  // Whether queries see keys [first, end), as kSomeTrue and kSomeFalse of MaskTiles.
  __device__ __forceinline__ uint32_t flags(int first, int end) const {
    if (rows == 0 || first >= end) return 0;
    bool none = true;
#pragma unroll 1
    for (int m = 0; m < count; ++m) {
      const Extremes& of = extremes[m];
      if (of.last_begin <= first && end <= of.first_end) return attention::MaskTiles::kSomeTrue;
      none &= end <= of.first_begin || of.last_end <= first;
    }
    return none ? attention::MaskTiles::kSomeFalse : flags_of_rows(first, end);
  }

 private:
  __device__ __forceinline__ uint32_t flags_of_rows(int first, int end) const {
    constexpr uint32_t kBoth = attention::MaskTiles::kSomeTrue | attention::MaskTiles::kSomeFalse;
    uint32_t found = 0;
#pragma unroll 1
    for (int row = 0; row < rows && found != kBoth; ++row) {
      bool covers = false;
      bool meets = false;
#pragma unroll 1
      for (int m = 0; m < count; ++m) {
        covers |= begins[m][row] <= first && end <= ends[m][row];
        meets |= begins[m][row] < end && first < ends[m][row];
      }
      // Intervals that cover the keys only together count as if they left a gap; then the keys are compared.
      found |= covers ? attention::MaskTiles::kSomeTrue : meets ? kBoth : uint32_t{attention::MaskTiles::kSomeFalse};
    }
    return found;
  }
};

}  // namespace flash_attn_ext::common
