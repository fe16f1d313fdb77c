// What intervals leave of tiles, against brute force over all pairs: IntervalRows, as GPU kernels classify tiles of 64
// queries, and SelectedKeys of the CPU. A tile without a visible pair is always skipped, and one that is said to be
// full always is. A full one is compared element by element only where a query sees it by several intervals together.
#include <climits>
#include <cstdio>
#include <vector>

using std::max;
using std::min;

// A warp runs lane by lane. Lane 0 comes last, so that it gets what all lanes reduce.
namespace warp {
inline int extremes[4];
inline int next = 0;

template <class Choose>
int reduce(int value, const Choose& choose) {
  int& extreme = extremes[next];
  next = (next + 1) % 4;
  return extreme = threadIdx.x % 32 == 31 ? value : choose(extreme, value);
}
}  // namespace warp

inline int __reduce_min_sync(uint32_t, int value) {
  return warp::reduce(value, [](int a, int b) { return min(a, b); });
}
inline int __reduce_max_sync(uint32_t, int value) {
  return warp::reduce(value, [](int a, int b) { return max(a, b); });
}
inline void __syncthreads() {}

#include "kernels/common/masks/interval_rows.cuh"
#include "kernels/cpu/schedule/selected_keys.h"

namespace {

using flash_attn_ext::common::IntervalRows;
using flash_attn_ext::cpu::SelectedKeys;
using namespace flash_attn_ext::attention;

class Problem {
 public:
  explicit Problem(uint32_t seed) : random_(seed) {
    const int queries = 1 + below(200);
    const int keys = 1 + below(400);
    const int heads = 1 + below(3);
    RowIntervals& intervals = params.score_mod.intervals;
    intervals.count = 1 + below(RowIntervals::kMost);
    intervals.query_stride = 2 * intervals.count;
    intervals.head_stride = below(2) == 0 ? 0 : queries * intervals.query_stride;
    bounds_.resize(heads * queries * intervals.query_stride);
    const int kind = below(4);
    for (int row = 0; row < heads * queries; ++row) fill(row, row % queries, kind, keys);
    intervals.data = bounds_.data();
    params.batch = 1;
    params.num_heads_q = params.num_heads_k = heads;
    params.sequences = {.cu_seqlens_q = nullptr,
                        .cu_seqlens_k = nullptr,
                        .max_seqlen_q = queries,
                        .max_seqlen_k = keys,
                        .total_q = queries,
                        .total_k = keys};
  }

  int below(int bound) { return std::uniform_int_distribution<int>(0, bound - 1)(random_); }

  // What intervals let the queries of a tile see of keys [first, end).
  struct Seen {
    bool none = true;
    bool all = true;
    bool all_by_one = true;  // each query by one of its intervals alone
  };
  Seen seen(int64_t head, const Interval& queries, const Interval& keys) const {
    const RowIntervals& intervals = params.score_mod.intervals;
    Seen seen;
    for (int64_t query = queries.begin; query < queries.end; ++query) {
      const int32_t* row = intervals.row(params.sequences.at(0), head, query);
      bool by_one = false;
      for (int m = 0; m < intervals.count; ++m) by_one |= row[2 * m] <= keys.begin && keys.end <= row[2 * m + 1];
      seen.all_by_one &= by_one;
      for (int64_t key = keys.begin; key < keys.end; ++key) {
        (intervals.sees(row, key) ? seen.none : seen.all) = false;
      }
    }
    return seen;
  }

  AttentionParams params;

 private:
  // kind 0: anything, outside of the keys too; 1: causal in documents; 2: blocks; 3: neighbours that touch.
  void fill(int row, int query, int kind, int keys) {
    const RowIntervals& intervals = params.score_mod.intervals;
    int at = 0;
    for (int m = 0; m < intervals.count; ++m) {
      int32_t* const bound = &bounds_[row * intervals.query_stride + 2 * m];
      const int begin = query / 70 * 70;
      if (kind == 0) {
        bound[0] = below(20) == 0 ? INT_MIN : below(keys + 40) - 20;
        bound[1] = below(20) == 0 ? INT_MAX : below(keys + 40) - 20;
      } else if (kind == 1) {
        bound[0] = m == 0 ? begin : 0;
        bound[1] = m == 0 ? query + 1 : below(2) * 30;
      } else if (kind == 2) {
        bound[0] = m * 128;
        bound[1] = m * 128 + (query % 3 + 1) * 40;
      } else {
        bound[0] = at;
        at += 20 + 64 * ((query + m) % 3);
        bound[1] = at;
      }
    }
  }

  std::mt19937 random_;
  std::vector<int32_t> bounds_;
};

void load(IntervalRows& rows, const AttentionParams& params, int head, int first_query) {
  const Sequence sequence = params.sequences.at(0);
  for (int w = 0; w < IntervalRows::kMost; ++w) {
    for (int lane = 31; lane >= 0; --lane) {
      threadIdx.x = 32 * w + lane;
      rows.load(params, sequence, head, first_query);
    }
  }
}

bool says(const char* what, int64_t query, int64_t first, int64_t end) {
  std::printf("queries from %ld on, keys [%ld, %ld): %s\n", static_cast<long>(query), static_cast<long>(first),
              static_cast<long>(end), what);
  return false;
}

bool agrees(const Problem::Seen& seen, bool some_true, bool some_false, int64_t query, const Interval& keys) {
  if (some_true == seen.none) return says(seen.none ? "not skipped" : "skipped", query, keys.begin, keys.end);
  if (!some_false && !seen.all) return says("taken for full", query, keys.begin, keys.end);
  if (some_false && seen.all_by_one) return says("not taken for full", query, keys.begin, keys.end);
  return true;
}

bool gpu_agrees(Problem& problem) {
  const auto [num_queries, num_keys] =
      std::pair(problem.params.sequences.max_seqlen_q, problem.params.sequences.max_seqlen_k);
  for (int64_t head = 0; head < problem.params.num_heads_q; ++head) {
    for (int64_t query = 0; query < num_queries + 64; query += 64) {
      IntervalRows rows;
      load(rows, problem.params, static_cast<int>(head), static_cast<int>(query));
      const Interval queries = {query, min(query + 64, num_queries)};
      if (queries.begin >= queries.end) {
        if (rows.flags(0, 1) != 0) return says("flags of no queries", query, 0, 1);
        continue;
      }
      int end_of_seen = 0;  // of the keys before the first one
      for (int first = 0; first < num_keys; ++first) {
        const int end = rows.end_before(first);
        if (end < end_of_seen || end > first || (end == 0) != (end_of_seen == 0))
          return says("before it", query, first, first);
        if (!problem.seen(head, queries, {first, first + 1}).none) end_of_seen = first + 1;
      }
      for (const int size : {1, 64, 128, 1 + problem.below(100)}) {
        for (int first = 0; first < num_keys; first += size) {
          const Interval keys = {first, min<int64_t>(first + size, num_keys)};
          const uint32_t flags = rows.flags(first, static_cast<int>(keys.end));
          const bool some_true = (flags & MaskTiles::kSomeTrue) != 0;
          const bool some_false = (flags & MaskTiles::kSomeFalse) != 0;
          if (!agrees(problem.seen(head, queries, keys), some_true, some_false, query, keys)) return false;
        }
      }
      if (rows.flags(5, 5) != 0) return says("flags of no keys", query, 5, 5);
    }
  }
  return true;
}

bool cpu_agrees(Problem& problem) {
  const AttentionParams& params = problem.params;
  SelectedKeys tile(params);
  const Interval heads = {0, params.num_heads_q};
  for (int64_t query = 0; query < params.sequences.max_seqlen_q;) {
    const Interval queries = {query, min<int64_t>(query + 1 + problem.below(40), params.sequences.max_seqlen_q)};
    tile.start(params.sequences.at(0), heads, queries);
    for (int64_t first = 0; first < params.sequences.max_seqlen_k;) {
      const Interval keys = {first, min<int64_t>(first + 1 + problem.below(80), params.sequences.max_seqlen_k)};
      Problem::Seen all;
      for (int64_t head = heads.begin; head < heads.end; ++head) {
        const Problem::Seen seen = problem.seen(head, queries, keys);
        all = {all.none && seen.none, all.all && seen.all, all.all_by_one && seen.all_by_one};
      }
      const TileCoverage coverage = tile.coverage(keys);
      const bool some_true = coverage != TileCoverage::kNone;
      if (!agrees(all, some_true, coverage != TileCoverage::kFull, query, keys)) return false;
      if (tile.score_mod(coverage).intervals.present() == (coverage == TileCoverage::kFull)) {
        return says("compared with intervals, or not", query, keys.begin, keys.end);
      }
      first = keys.end;
    }
    query = queries.end;
  }
  return true;
}

}  // namespace

int main() {
  for (uint32_t seed = 0; seed < 300; ++seed) {
    Problem problem(seed);
    if (gpu_agrees(problem) && cpu_agrees(problem)) continue;
    std::printf("problem %u\n", seed);
    return 1;
  }
  return 0;
}
