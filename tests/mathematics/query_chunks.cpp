// QueryChunks on random problems. All launches together do what one launch does without chunks: each key tile iterates
// once over each query tile that sees it, takes partial sums that it has left, and writes its gradients once. In a
// launch, the ranks of a query tile's contributors have no gaps, and a contributor waits for none that is fetched
// later. In ascending and descending order, a key tile iterates in the order of a call without chunks.
#include "kernels/schedule/query_chunks.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <random>
#include <tuple>
#include <vector>

#include "kernels/plan/sm90/sm90.h"

namespace {

using flash_attn_ext::LoopDirection;
using flash_attn_ext::LoopOrder;
using flash_attn_ext::QueryChunks;
using namespace flash_attn_ext::attention;

struct Problem {
  BackwardParams p;
  std::vector<Sequence> sequences;
  std::vector<int32_t> offsets_q;
  std::vector<int32_t> offsets_k;
  QueryChunks chunks;
  LoopOrder order;

  const Sequence& sequence_of(uint32_t pair) const {
    return sequences[pair / (static_cast<uint32_t>(p.num_heads_k) * order.kv_group_shares)];
  }
  bool packed() const { return p.sequences.cu_seqlens_q != nullptr; }
};

// What became of a key tile.
struct KeyTile {
  std::vector<int> query_tiles;  // in the order of its iterations
  bool has_partial_sums = false;
  int written = 0;
};

bool fails(const char* what, const Problem& problem) {
  const Sequence& s = problem.sequences[0];
  std::printf(
      "%s: %zu sequences, the first of %lld queries and %lld keys, right %lld, top_left %d, chunks of %d tiles\n", what,
      problem.sequences.size(), static_cast<long long>(s.num_queries), static_cast<long long>(s.num_keys),
      static_cast<long long>(problem.p.visibility.right), problem.p.visibility.top_left, problem.chunks.tiles);
  return false;
}

// The iterations of a part in the kernel's order, by the numbers that query tiles have in it.
std::vector<int> iterations_of(const QueryChunks::Part& part) {
  const LoopOrder::Tiles& tiles = part.query_tiles;
  const LoopDirection direction = part.contributor.direction;
  if (!part.exists || tiles.empty()) return {};
  std::vector<int> iterations;
  int at = direction == LoopDirection::kCyclic       ? part.contributor.first_of_cycle()
           : direction == LoopDirection::kDescending ? tiles.end - 1
                                                     : tiles.begin;
  for (int i = tiles.begin; i < tiles.end; ++i) {
    iterations.push_back(at);
    at += direction == LoopDirection::kDescending ? -1 : 1;
    if (at == tiles.end) at = tiles.begin;
  }
  return iterations;
}

bool launch_is_right(const Problem& problem, int launch, std::map<std::tuple<uint32_t, int>, KeyTile>& key_tiles) {
  const LoopOrder& order = problem.order;
  const LoopOrder::KeyTiles scheduled = problem.chunks.key_tiles(order, problem.p, launch);
  std::map<std::tuple<uint32_t, int>, std::map<int, uint32_t>> work_tile_of_rank;
  for (uint32_t index = 0; index < order.num_work_tiles(order.pairs, scheduled); ++index) {
    const LoopOrder::WorkTile work_tile = order.work_tile(index, scheduled);
    const Sequence& sequence = problem.sequence_of(work_tile.pair);
    if (work_tile.tile >= LoopOrder::num_tiles(sequence.num_keys, LoopOrder::kKeys)) continue;
    const LoopOrder::Tiles visible =
        sequence.num_queries == 0 ? LoopOrder::Tiles{0, 0}
                                  : LoopOrder::visible_query_tiles(problem.p.visibility, sequence, work_tile.tile);
    const QueryChunks::Part part = problem.chunks.part(
        launch, order.contributor(problem.p.visibility, sequence, work_tile.tile, work_tile.direction), visible);
    if (!part.exists && !problem.packed()) return fails("a work tile without a part", problem);
    KeyTile& key_tile = key_tiles[{work_tile.pair, work_tile.tile}];
    if (part.has_partial_sums != key_tile.has_partial_sums && part.exists) {
      return fails("not the partial sums that are there", problem);
    }
    if (part.exists) key_tile.has_partial_sums = !part.is_last;
    key_tile.written += part.is_last ? 1 : 0;
    for (const int at : iterations_of(part)) {
      if (key_tile.written > (part.is_last ? 1 : 0)) return fails("an iteration after the last one", problem);
      key_tile.query_tiles.push_back(at + part.first_query_tile);
      const int rank = part.contributor.rank(at, part.contributor.contributors(at));
      if (!work_tile_of_rank[{work_tile.pair, at + part.first_query_tile}].insert({rank, index}).second) {
        return fails("two contributors of one rank", problem);
      }
    }
  }
  for (const auto& [query_tile, of_rank] : work_tile_of_rank) {
    const auto& [pair, tile] = query_tile;
    const LoopOrder::Contributor any =
        order.contributor(problem.p.visibility, problem.sequence_of(pair), 0,
                          order.cyclic ? LoopDirection::kCyclic : LoopDirection::kAscending);
    const LoopOrder::Tiles contributors = any.contributors(tile);
    if (static_cast<int>(of_rank.size()) != contributors.end - contributors.begin) {
      return fails("not all contributors in one launch", problem);
    }
    int expected = 0;
    uint32_t before = 0;
    for (const auto& [rank, index] : of_rank) {
      if (rank != expected++) return fails("a rank is left out", problem);
      const bool waits = rank > 0;
      if (waits && !order.cyclic && before > index) return fails("waits for a later work tile", problem);
      if (waits && order.cyclic && before >= order.work_tile(index, scheduled).phase_end) {
        return fails("waits for a later phase", problem);
      }
      before = index;
    }
  }
  return true;
}

bool is_right(const Problem& problem) {
  std::map<std::tuple<uint32_t, int>, KeyTile> key_tiles;
  for (int launch = 0; launch < problem.chunks.count; ++launch) {
    if (!launch_is_right(problem, launch, key_tiles)) return false;
  }
  const LoopOrder& order = problem.order;
  for (uint32_t index = 0; index < order.num_work_tiles(); ++index) {
    const LoopOrder::WorkTile work_tile = order.work_tile(index);
    const Sequence& sequence = problem.sequence_of(work_tile.pair);
    if (work_tile.tile >= LoopOrder::num_tiles(sequence.num_keys, LoopOrder::kKeys)) continue;
    const KeyTile& key_tile = key_tiles[{work_tile.pair, work_tile.tile}];
    if (key_tile.written != 1) return fails("gradients are not written once", problem);
    const LoopOrder::Tiles visible =
        sequence.num_queries == 0 ? LoopOrder::Tiles{0, 0}
                                  : LoopOrder::visible_query_tiles(problem.p.visibility, sequence, work_tile.tile);
    std::vector<int> expected;
    for (int tile = visible.begin; tile < visible.end; ++tile) expected.push_back(tile);
    std::vector<int> found = key_tile.query_tiles;
    if (work_tile.direction == LoopDirection::kDescending) found = {found.rbegin(), found.rend()};
    if (work_tile.direction == LoopDirection::kCyclic) std::sort(found.begin(), found.end());
    if (found != expected) return fails("not the iterations of a call without chunks", problem);
  }
  return true;
}

Problem random_problem(std::mt19937& random) {
  const auto pick = [&](int least, int most) { return least + static_cast<int>(random() % (most - least + 1)); };
  Problem problem;
  BackwardParams& p = problem.p;
  const int longest_q = pick(1, 1800);
  const int longest_k = pick(0, 1) ? longest_q : pick(1, std::min(8 * longest_q, 2500));
  const bool packed = pick(0, 2) == 0;
  const int batch = pick(1, 3);
  problem.offsets_q = problem.offsets_k = {0};
  for (int b = 0; b < batch; ++b) {
    const int64_t queries = packed ? pick(0, longest_q) : longest_q;
    const int64_t keys = packed ? pick(0, longest_k) : longest_k;
    problem.sequences.push_back({b, 0, 0, queries, keys});
    problem.offsets_q.push_back(problem.offsets_q.back() + static_cast<int32_t>(queries));
    problem.offsets_k.push_back(problem.offsets_k.back() + static_cast<int32_t>(keys));
  }
  p.element = ElementType::kBFloat16;
  p.batch = batch;
  p.num_heads_k = pick(1, 3);
  p.num_heads_q = p.num_heads_k * pick(1, 4);
  p.head_dim_qk = p.head_dim_v = pick(0, 1) ? 64 : 128;
  p.sequences = {nullptr, nullptr, longest_q, longest_k, longest_q * batch, longest_k * batch};
  if (pick(0, 2) > 0) p.visibility.right = pick(0, 1) ? 0 : pick(0, 700);
  p.visibility.top_left = pick(0, 1);
  const int tiles = LoopOrder::num_tiles(longest_q, LoopOrder::kQueries);
  problem.chunks.tiles = pick(1, tiles);
  problem.chunks.count = static_cast<int>(ceil_div(tiles, problem.chunks.tiles));
  problem.order = flash_attn_ext::plan::loop_order(p, pick(1, 12), problem.chunks.tiles);
  if (packed) {
    p.sequences.cu_seqlens_q = problem.offsets_q.data();
    p.sequences.cu_seqlens_k = problem.offsets_k.data();
  }
  return problem;
}

}  // namespace

int main() {
  std::mt19937 random(1);
  for (int i = 0; i < 3000; ++i) {
    const Problem problem = random_problem(random);
    if (problem.order.shares_query_tiles()) continue;  // calls with such shares have no chunks
    if (!is_right(problem)) return 1;
  }
  return 0;
}
