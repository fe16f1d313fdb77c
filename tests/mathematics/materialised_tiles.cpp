// SeenTiles and MaterialisedTiles on random problems. A tile is stored, and read, if a query of it sees a key of it; if
// it counts as full, all queries see all keys. However much room a launch has, exactly one launch stores each tile,
// inside the matrix, and no two tiles share a place. The key chunks of a chunk begin with the first key, one of them is
// the last one of each row, and each key tile is in one of them, whether it is seen or not.
#include <cstdio>
#include <random>
#include <set>
#include <vector>

#include "kernels/sm90/backward/two_pass/seen_tiles.h"

namespace {

using flash_attn_ext::MaterialisedTiles;
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

// How many of a tile's pairs are visible, and whether each of its queries sees all keys that a whole tile has.
struct Tile {
  int visible = 0;
  bool full = true;
};

std::vector<Tile> count(const Problem& problem, int key_tiles) {
  const Sequence& s = problem.sequence;
  std::vector<Tile> tiles(static_cast<size_t>(MaterialisedTiles::num_tiles(s.num_queries)) * key_tiles);
  for (int64_t query = 0; query < s.num_queries; ++query) {
    const Interval keys = problem.visibility.keys_of(query, s);
    for (int j = 0; j < key_tiles; ++j) {
      Tile& tile = tiles[query / MaterialisedTiles::kRows * key_tiles + j];
      const int64_t begin = std::max<int64_t>(keys.begin, j * MaterialisedTiles::kRows);
      const int64_t end = std::min<int64_t>(keys.end, (j + 1) * MaterialisedTiles::kRows);
      if (begin < end) tile.visible += static_cast<int>(end - begin);
      tile.full &= end - begin == MaterialisedTiles::kRows;
    }
  }
  return tiles;
}

// Goes through the query chunks, one after the other, and the key chunks of each. `begin`: the sequence's first row; 0
// but in a packed batch. key_chunk_tiles: 0 for chunks without key chunks.
bool chunks_are_right(const Problem& problem, int64_t room, int begin, int key_chunk_tiles) {
  const Sequence& s = problem.sequence;
  const int query_tiles = MaterialisedTiles::num_tiles(s.num_queries);
  const int key_tiles = MaterialisedTiles::num_tiles(s.num_keys);
  const std::vector<Tile> visible = count(problem, key_tiles);
  const int32_t any_offsets[2] = {};
  AttentionParams p;
  p.batch = p.num_heads_q = p.num_heads_k = 1;
  p.visibility = problem.visibility;
  p.sequences = {.max_seqlen_q = s.num_queries, .max_seqlen_k = s.num_keys};
  if (begin > 0) {
    p.sequences.cu_seqlens_q = any_offsets;
    p.sequences.total_q = (begin + query_tiles) * MaterialisedTiles::kRows;
  }
  MaterialisedTiles tiles = MaterialisedTiles::of(p);
  std::vector<int> stored(visible.size());
  std::vector<int> rows_ended(query_tiles);
  bool is_right = true;
  const auto check = [&](bool holds, const char* what) { is_right = is_right && (holds || fails(what, problem)); };
  for (int end = tiles.rows; end > 0 && is_right; end = tiles.chunk_begin) {
    tiles.choose_chunk(p, end, room);
    check(tiles.chunk_begin < end, "an empty chunk");
    check(tiles.in_matrix <= room, "a chunk with too little room");
    bool begins_keys = true;
    std::vector<int> times_in_chunks(key_tiles);
    flash_attn_ext::for_each_key_chunk(p, tiles, key_chunk_tiles, [&](const MaterialisedTiles& launch) {
      check(launch.begins_keys() == begins_keys, "a key_chunk that takes itself for the first one, or does not");
      begins_keys = false;
      for (int j = 0; j < key_tiles; ++j) times_in_chunks[j] += j >= launch.key_chunk_begin && j < launch.key_chunk_end;
      const SeenTiles seen = SeenTiles::of(problem.visibility, s, launch);
      std::set<int> taken;
      for (int i = launch.begin_of(begin); i < std::min(launch.end_of(begin), query_tiles); ++i) {
        rows_ended[i] += launch.ends_keys;
        const TileRange keys = seen.keys_of(i);
        for (int j = keys.begin; j < keys.end; ++j) {
          ++stored[i * key_tiles + j];
          const int place = launch.first_of_head(p, s, 0, 0) + launch.before(begin + i) + j - keys.begin;
          check(place >= 0 && place < launch.in_matrix, "outside the matrix");
          check(taken.insert(place).second, "a place taken twice");
        }
      }
    });
    for (const int times : times_in_chunks) check(times == 1, "a tile of keys in several key chunks, or in none");
  }
  for (size_t i = 0; i < visible.size(); ++i) {
    check(stored[i] == (visible[i].visible > 0), "a tile that several launches store, or none");
  }
  for (const int times : rows_ended) check(times == 1, "a row with several last key chunks, or none");
  return is_right;
}

bool tiles_are_right(const Problem& problem) {
  const Sequence& s = problem.sequence;
  const SeenTiles seen = SeenTiles::of(problem.visibility, s, MaterialisedTiles{});
  const int query_tiles = MaterialisedTiles::num_tiles(s.num_queries);
  const int key_tiles = MaterialisedTiles::num_tiles(s.num_keys);
  const std::vector<Tile> tiles = count(problem, key_tiles);
  for (int i = 0; i < query_tiles + 2; ++i) {  // the second warpgroup may have none
    const TileRange keys = seen.keys_of(i);
    if (i >= query_tiles && !keys.empty()) return fails("a tile of queries that is not there", problem);
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
    const int64_t three_rows = 3 * (MaterialisedTiles::num_tiles(problem.sequence.num_keys) + 1);
    const auto room = three_rows + static_cast<int64_t>(random() % 100);
    if (!chunks_are_right(problem, room, 0, 0)) return 1;
    if (!chunks_are_right(problem, room, 1 + static_cast<int>(random() % 5), 0)) return 1;
    const bool has_key_chunks = problem.visibility.left == Visibility::kUnbounded;
    if (has_key_chunks && !chunks_are_right(problem, room, 0, 1 + static_cast<int>(random() % 4))) return 1;
  }
  return 0;
}
