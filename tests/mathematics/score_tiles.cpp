// SeenTiles and ScoreTiles on random problems: a tile is stored, and read, where a query of it sees a key of it; where
// it counts as full, all do; all tiles lie in their matrix; and no two of them in one place.
#include <cstdio>
#include <random>
#include <set>
#include <vector>

#include "kernels/sm90/backward_storing/seen_tiles.h"

namespace {

using flash_attn_ext::ScoreTiles;
using flash_attn_ext::TileRange;
using flash_attn_ext::sm90::SeenTiles;
using namespace flash_attn_ext::attention;

struct Problem {
  Visibility visibility;
  Sequence sequence;
};

bool fails(const char* what, const Problem& problem) {
  const Sequence& s = problem.sequence;
  std::printf("%s: %lld queries and %lld keys, left %lld, right %lld, top_left %d\n", what,
              static_cast<long long>(s.num_queries), static_cast<long long>(s.num_keys),
              static_cast<long long>(problem.visibility.left), static_cast<long long>(problem.visibility.right),
              problem.visibility.top_left);
  return false;
}

// Of a tile's pairs that exist: how many are visible, and whether those of all keys are that it would have.
struct Tile {
  int visible = 0;
  bool full = true;
};

std::vector<Tile> count(const Problem& problem, int key_tiles) {
  const Sequence& s = problem.sequence;
  std::vector<Tile> tiles(static_cast<size_t>(ScoreTiles::num_tiles(s.num_queries)) * key_tiles);
  for (int64_t query = 0; query < s.num_queries; ++query) {
    const Interval keys = problem.visibility.keys_of(query, s);
    for (int j = 0; j < key_tiles; ++j) {
      Tile& tile = tiles[query / ScoreTiles::kRows * key_tiles + j];
      const int64_t begin = std::max<int64_t>(keys.begin, j * ScoreTiles::kRows);
      const int64_t end = std::min<int64_t>(keys.end, (j + 1) * ScoreTiles::kRows);
      if (begin < end) tile.visible += static_cast<int>(end - begin);
      tile.full &= end - begin == ScoreTiles::kRows;
    }
  }
  return tiles;
}

bool tiles_are_right(const Problem& problem) {
  const Sequence& s = problem.sequence;
  const SeenTiles seen = SeenTiles::of(problem.visibility, s);
  const int query_tiles = ScoreTiles::num_tiles(s.num_queries);
  const int key_tiles = ScoreTiles::num_tiles(s.num_keys);
  const std::vector<Tile> tiles = count(problem, key_tiles);
  AttentionParams p;
  p.visibility = problem.visibility;
  p.sequences = {.max_seqlen_q = s.num_queries, .max_seqlen_k = s.num_keys};
  const ScoreTiles places = ScoreTiles::of(p);
  std::set<int> taken;
  for (int i = 0; i < query_tiles + 2; ++i) {  // the second warpgroup may have none
    const TileRange keys = seen.keys_of(i);
    if (i >= query_tiles && !keys.empty()) return fails("a tile of queries that is not there", problem);
    for (int j = keys.begin; j < keys.end; ++j) {
      const int place = places.before(i) + j - keys.begin;
      if (place >= places.in_matrix) return fails("outside the matrix", problem);
      if (!taken.insert(place).second) return fails("a place taken twice", problem);
    }
    for (int j = 0; i < query_tiles && j < key_tiles; ++j) {
      const Tile& tile = tiles[i * key_tiles + j];
      const bool stored = j >= keys.begin && j < keys.end;
      const TileRange queries = seen.queries_of(j);
      const bool read = i >= queries.begin && i < queries.end;
      if (stored != (tile.visible > 0) || read != stored) return fails("stored or read", problem);
      if (stored && keys.full(j) != tile.full) return fails("full", problem);
    }
  }
  for (int j = key_tiles; j < key_tiles + 3; ++j) {
    if (!seen.queries_of(j).empty()) return fails("a tile of keys that is not there", problem);
  }
  return true;
}

}  // namespace

int main() {
  std::mt19937 random(1);
  const auto length = [&] { return static_cast<int64_t>(random() % 700); };
  const auto reach = [&] {
    const auto kind = random() % 4;
    return kind == 0 ? Visibility::kUnbounded : static_cast<int64_t>(random() % (kind == 1 ? 3 : 300));
  };
  for (int i = 0; i < 5000; ++i) {
    const Problem problem = {{reach(), reach(), random() % 2 == 0}, {0, 0, 0, length(), length()}};
    if (!tiles_are_right(problem)) return 1;
  }
  return 0;
}
