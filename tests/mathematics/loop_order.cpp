// LoopOrder on random problems. Each key tile that sees a query tile contributes to it once, and the ranks of
// contributors have no gaps. An iteration waits only for work tiles that were fetched before, or for those of its
// phase. CTAs that fetch work tiles as the kernel does therefore finish, however few they are and however long a tile
// takes. All of this also holds for shares of query tiles, for the iterations that a mask leaves, for the L2 head
// groups of sparse lists, where long key tiles are divided into parts, and where only work tiles that exist are
// fetched.
#include "kernels/schedule/loop_order.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "kernels/plan/sm90/sm90.h"
#include "kernels/schedule/existing_tiles.h"
#include "kernels/schedule/key_tile_parts.h"
#include "kernels/schedule/mask_iterations.h"

namespace {

using flash_attn_ext::ExistingTiles;
using flash_attn_ext::KeyTileParts;
using flash_attn_ext::LoopDirection;
using flash_attn_ext::LoopOrder;
using flash_attn_ext::MaskIterations;
using namespace flash_attn_ext::attention;

struct Problem {
  Visibility visibility;
  std::vector<Sequence> sequences;
  LoopOrder order;
  int blocks;
  int heads;
  bool masked;
  uint32_t hidden;           // iterations of 16
  KeyTileParts parts = {0};  // 0: key tiles are not divided
  bool lists_existing = false;

  // Whether a mask, which each pair has for itself, leaves the iteration.
  bool is_left(uint32_t pair, int key_tile, int query_tile) const {
    const uint32_t mixed = ((pair * 8191 + key_tile) * 131071 + query_tile) * 2654435761u;
    return !masked || (mixed >> 20) % 16 >= hidden;
  }

  // A mask may turn a descending pair into an ascending one.
  LoopOrder::WorkTile work_tile(uint32_t index) const {
    const LoopOrder::WorkTile of_order = order.work_tile(index);
    const bool is_turned = masked && (of_order.pair * 2654435761u >> 20) % 2 == 0;
    return is_turned && of_order.direction == LoopDirection::kDescending ? order.ascending(of_order) : of_order;
  }

  const Sequence& sequence_of(uint32_t pair) const { return sequences[pair / (heads * order.kv_group_shares)]; }
  int share_of(uint32_t pair) const { return static_cast<int>(pair % order.kv_group_shares); }
  LoopOrder::Tiles query_tiles_of(uint32_t pair) const {
    const int tiles = LoopOrder::num_tiles(sequence_of(pair).num_queries, LoopOrder::kQueries);
    return order.query_tiles_of_share(tiles, share_of(pair));
  }
};

struct Iteration {
  int query_tile;
  int sums;  // the accumulator of the query tile to which the contributor adds
  int rank;
  bool is_last = false;  // known with a mask
};

// An accumulator of dQ: pair, query tile, and which of its accumulators.
using Sums = std::tuple<uint32_t, int, int>;

// The iterations of a work tile, in the kernel's order (sm90/backward/key_stationary/producer.cuh).
std::vector<Iteration> iterations_of(const Problem& problem, const LoopOrder::WorkTile& work_tile) {
  const Sequence& sequence = problem.sequence_of(work_tile.pair);
  if (work_tile.tile >= LoopOrder::num_tiles(sequence.num_keys, LoopOrder::kKeys) || sequence.num_queries == 0)
    return {};
  const LoopOrder::Tiles visible = LoopOrder::visible_query_tiles(problem.visibility, sequence, work_tile.tile);
  const LoopOrder::Tiles of_share = problem.query_tiles_of(work_tile.pair);
  const LoopOrder::Tiles range = {std::max(visible.begin, of_share.begin), std::min(visible.end, of_share.end)};
  const LoopOrder::Contributor contributor = problem.order.contributor(
      problem.visibility, sequence, work_tile.tile, work_tile.direction, problem.share_of(work_tile.pair));
  std::vector<Iteration> iterations;
  if (problem.masked) {  // sm90/backward/key_stationary/mask_iterations.cu
    for (int i = 0; i < range.end - range.begin; ++i) {
      const int query_tile = MaskIterations::query_tile(contributor, range, i);
      if (!problem.is_left(work_tile.pair, work_tile.tile, query_tile)) continue;
      const LoopOrder::Tiles contributors = contributor.contributors(query_tile);
      int rank = 0;
      int left = 0;
      for (int rank_of_all = 0; rank_of_all < contributors.end - contributors.begin; ++rank_of_all) {
        const int tile = contributor.key_tile_of_rank(query_tile, contributors, rank_of_all);
        LoopOrder::Contributor other = contributor;
        other.tile = tile;
        if (other.rank(query_tile, contributors) != rank_of_all) std::abort();
        if (tile == work_tile.tile) rank = left;
        left += problem.is_left(work_tile.pair, tile, query_tile) ? 1 : 0;
      }
      iterations.push_back({query_tile, 0, rank, rank + 1 == left});
    }
    return iterations;
  }
  const int sums = work_tile.direction == LoopDirection::kSplitKv ? contributor.phase() : 0;
  int at = work_tile.direction == LoopDirection::kCyclic       ? contributor.first_of_cycle()
           : work_tile.direction == LoopDirection::kDescending ? range.end - 1
                                                               : range.begin;
  for (int i = range.begin; i < range.end; ++i) {
    iterations.push_back({at, sums, contributor.rank(at, contributor.contributors(at))});
    at += work_tile.direction == LoopDirection::kDescending ? -1 : 1;
    if (at == range.end) at = range.begin;
  }
  return iterations;
}

bool fails(const char* what, const Problem& problem) {
  const Sequence& s = problem.sequences[0];
  std::printf(
      "%s: %zu sequences, the first of %lld queries and %lld keys, left %lld, right %lld, top_left %d, %d heads, "
      "%d blocks, phases 2^%u, %u of 16 hidden\n",
      what, problem.sequences.size(), static_cast<long long>(s.num_queries), static_cast<long long>(s.num_keys),
      static_cast<long long>(problem.visibility.left), static_cast<long long>(problem.visibility.right),
      problem.visibility.top_left, problem.heads, problem.blocks, problem.order.log2_phases,
      problem.masked ? problem.hidden : 0);
  return false;
}

bool ranks_are_right(const Problem& problem) {
  std::map<Sums, std::map<int, uint32_t>> work_tile_of_rank;
  std::set<std::tuple<uint32_t, int, int>> last;
  std::set<std::pair<uint32_t, int>> fetched;
  for (uint32_t index = 0; index < problem.order.num_work_tiles(); ++index) {
    const LoopOrder::WorkTile work_tile = problem.work_tile(index);
    if (!fetched.insert({work_tile.pair, work_tile.tile}).second) return fails("a work tile twice", problem);
    for (const Iteration& iteration : iterations_of(problem, work_tile)) {
      if (!work_tile_of_rank[{work_tile.pair, iteration.query_tile, iteration.sums}]
               .insert({iteration.rank, index})
               .second) {
        return fails("two contributors of one rank", problem);
      }
      if (iteration.is_last) last.insert({work_tile.pair, iteration.query_tile, iteration.rank});
    }
  }
  for (uint32_t pair = 0; pair < problem.order.pairs; ++pair) {
    const Sequence& sequence = problem.sequence_of(pair);
    for (int i = 0; i < LoopOrder::num_tiles(sequence.num_queries, LoopOrder::kQueries); ++i) {
      const LoopOrder::Tiles contributors =
          problem.order.contributor(problem.visibility, sequence, 0, LoopDirection::kAscending).contributors(i);
      const LoopOrder::Tiles of_share = problem.query_tiles_of(pair);
      const bool is_in_share = i >= of_share.begin && i < of_share.end;
      int seen = 0;
      for (int tile = contributors.begin; tile < contributors.end; ++tile)
        seen += is_in_share && problem.is_left(pair, tile, i) ? 1 : 0;
      int count = 0;
      for (int accumulator = 0; accumulator < 1 << problem.order.log2_accumulators; ++accumulator) {
        const auto found = work_tile_of_rank.find({pair, i, accumulator});
        // An accumulator without contributors is not read (sm90/backward/key_stationary/dq_sums.cuh).
        const bool is_read =
            seen > 0 && (accumulator - contributors.begin & (1 << problem.order.log2_accumulators) - 1) <
                            contributors.end - contributors.begin;
        if (is_read != (found != work_tile_of_rank.end())) return fails("an accumulator without contributors", problem);
        if (!is_read) continue;
        uint32_t before = 0;
        int rank = 0;
        for (const auto& [at, index] : found->second) {
          if (at != rank++) return fails("a rank is left out", problem);
          const LoopOrder::WorkTile work_tile = problem.work_tile(index);
          if (at > 0 && work_tile.direction != LoopDirection::kCyclic && before > index)
            return fails("waits for a work tile that is fetched later", problem);
          if (at > 0 && work_tile.direction == LoopDirection::kCyclic && before >= work_tile.phase_end) {
            return fails("waits for a later phase", problem);
          }
          before = index;
        }
        count += rank;
      }
      if (count != seen) return fails("not as many contributors as there are", problem);
      const auto others = last.lower_bound({pair, i, 0});
      const bool has_last = others != last.end() && *others == std::tuple{pair, i, seen - 1};
      if (problem.masked && has_last != (seen > 0)) return fails("not the last one is last", problem);
    }
  }
  return true;
}

// An entry of the table of key tiles: one of the parts of a work tile.
struct Entry {
  LoopOrder::WorkTile work_tile;
  int part;
  int parts;
};

std::vector<Entry> entries_of(const Problem& problem) {
  std::vector<Entry> entries;
  for (uint32_t index = 0; index < problem.order.num_work_tiles(); ++index) {
    LoopOrder::WorkTile work_tile = problem.work_tile(index);
    if (problem.lists_existing) {
      const int key_tiles = LoopOrder::num_tiles(problem.sequence_of(work_tile.pair).num_keys, LoopOrder::kKeys);
      if (work_tile.tile >= key_tiles) continue;
      const auto entry = static_cast<uint32_t>(entries.size());
      const int end = ExistingTiles::end_of_phase(problem.order, work_tile, key_tiles, entry);
      work_tile.phase_end = static_cast<uint32_t>(end);
    }
    const auto iterations = static_cast<int>(iterations_of(problem, work_tile).size());
    const int parts = problem.parts.iterations == 0 ? 1 : problem.parts.count(iterations);
    for (int part = 0; part < parts; ++part) entries.push_back({work_tile, part, parts});
  }
  return entries;
}

// CTAs do a random number of iterations one after the other. A CTA fetches its next work tile, and starts it, while its
// last one is still running, as early as the kernel may.
bool ends(const Problem& problem, std::mt19937& random) {
  struct Work {
    uint32_t pair;
    std::vector<Iteration> iterations;
    size_t next = 0;
  };
  struct Block {
    std::vector<Work> works;
    uint32_t phase_end = 0;  // of the work tile that was fetched last
  };
  std::map<Sums, int> done;
  std::vector<Block> blocks(problem.blocks);
  const std::vector<Entry> entries = entries_of(problem);
  const auto count = static_cast<uint32_t>(entries.size());
  uint32_t fetched = 0;
  const auto work_tile = [&](Block& block) {
    const auto& [next, part, parts] = entries[fetched++];
    const std::vector<Iteration> all = iterations_of(problem, next);
    const auto first_of = [&](int i) {
      return all.begin() + KeyTileParts::first(static_cast<int>(all.size()), i, parts);
    };
    block.works.push_back({next.pair, {first_of(part), first_of(part + 1)}});
    block.phase_end = next.phase_end;
  };
  for (auto& block : blocks) {
    if (fetched < count) work_tile(block);
  }
  const auto can_fetch = [&](const Block& block) {
    return fetched < count && block.works.size() <= 1 && fetched >= block.phase_end;
  };
  const auto can_go_on = [&](const Work& work) {
    if (work.next == work.iterations.size()) return true;
    const Iteration& iteration = work.iterations[work.next];
    return done[{work.pair, iteration.query_tile, iteration.sums}] == iteration.rank;
  };
  for (;;) {
    bool any = false;
    for (const auto& block : blocks) any |= can_fetch(block) || (!block.works.empty() && can_go_on(block.works[0]));
    if (!any) break;
    for (auto& block : blocks) {
      if (random() % 2 == 0 && can_fetch(block)) work_tile(block);
      std::vector<Work>& works = block.works;
      for (int steps = static_cast<int>(random() % 5); steps > 0 && !works.empty() && can_go_on(works[0]); --steps) {
        Work& work = works[0];
        if (work.next == work.iterations.size()) {
          works.erase(works.begin());
        } else {
          const Iteration& iteration = work.iterations[work.next++];
          ++done[{work.pair, iteration.query_tile, iteration.sums}];
        }
      }
    }
  }
  for (const auto& block : blocks) {
    if (!block.works.empty()) return fails("deadlock", problem);
  }
  return fetched == count || fails("not all is fetched", problem);
}

Problem random_problem(std::mt19937& random) {
  const auto pick = [&](int least, int most) { return least + static_cast<int>(random() % (most - least + 1)); };
  Problem problem;
  const int64_t longest_q = pick(1, 1400);
  const int64_t longest_k = pick(0, 1) ? longest_q : pick(0, 1) ? pick(1, 2000) : pick(1, 300);
  const bool packed = pick(0, 2) == 0;
  const int batch = pick(1, 3);
  for (int b = 0; b < batch; ++b) {
    const int64_t queries = packed ? pick(0, static_cast<int>(longest_q)) : longest_q;
    const int64_t keys = packed ? pick(0, static_cast<int>(longest_k)) : longest_k;
    problem.sequences.push_back({b, 0, 0, queries, keys});
  }
  problem.heads = pick(1, 3);
  problem.blocks = pick(0, 1) ? pick(1, 12) : pick(12, 40);
  if (pick(0, 2) > 0) problem.visibility.right = pick(0, 1) ? 0 : pick(0, 700);
  if (pick(0, 2) == 0) problem.visibility.left = pick(0, 700);
  problem.visibility.top_left = pick(0, 1);
  BackwardParams p;
  p.element = ElementType::kBFloat16;
  p.batch = batch;
  p.num_heads_k = problem.heads;
  p.num_heads_q = problem.heads * pick(1, 4);
  p.head_dim_qk = p.head_dim_v = pick(0, 1) ? 64 : 128;
  p.sequences = {nullptr, nullptr, longest_q, longest_k, longest_q * batch, longest_k * batch};
  p.visibility = problem.visibility;
  const int32_t no_interval[2] = {};
  const bool has_intervals = pick(0, 2) == 0;
  if (has_intervals) p.score_mod.intervals = {.data = no_interval, .count = 1};
  const bool masked = has_intervals || pick(0, 1) == 1;
  if (masked && !has_intervals) p.score_mod.mask.data = no_interval;
  problem.order =
      flash_attn_ext::plan::loop_order(p, problem.blocks, LoopOrder::num_tiles(longest_q, LoopOrder::kQueries));
  problem.masked = !problem.order.split_kv && masked;
  if (problem.order.waiting_group_pairs > 0 && pick(0, 1)) problem.order = problem.order.with_larger_groups();
  problem.hidden = pick(0, 15);
  if (problem.masked && !problem.order.cyclic && pick(0, 1)) problem.parts = {pick(1, 6)};
  problem.lists_existing = packed && !problem.masked && pick(0, 1);
  return problem;
}

enum class Selection { kCausal, kBlocks, kIntervals };

// The pairs of an L2 head group, and those where key tiles wait for each other, of 16 heads on 132 CTAs.
bool groups_are(int64_t tokens, int64_t head_dim, Selection selection, uint32_t pairs, uint32_t sparse_pairs) {
  BackwardParams p;
  p.element = ElementType::kBFloat16;
  p.batch = 1;
  p.num_heads_q = p.num_heads_k = 16;
  p.head_dim_qk = p.head_dim_v = head_dim;
  p.sequences = {nullptr, nullptr, tokens, tokens, tokens, tokens};
  const uint8_t blocks = 0;
  const int32_t no_interval[2] = {};
  if (selection == Selection::kBlocks) p.score_mod.blocks.data = &blocks;
  if (selection == Selection::kIntervals) p.score_mod.intervals = {.data = no_interval, .count = 1};
  if (selection == Selection::kCausal) p.visibility.right = 0;
  const LoopOrder order = flash_attn_ext::plan::loop_order(p, 132, LoopOrder::num_tiles(tokens, LoopOrder::kQueries));
  if (order.head_group_pairs == pairs && order.waiting_group_pairs == sparse_pairs) return true;
  std::printf("%lld tokens, head dim %lld, selection %d: groups of %u pairs, and of %u where key tiles wait\n",
              static_cast<long long>(tokens), static_cast<long long>(head_dim), static_cast<int>(selection),
              order.head_group_pairs, static_cast<unsigned>(order.waiting_group_pairs));
  return false;
}

// The parts of a key tile have all of its iterations, about as many each, and only long ones are divided.
bool parts_are_right() {
  for (int iterations = 1; iterations < 40; ++iterations) {
    const KeyTileParts parts = {iterations};
    for (int of_tile = 0; of_tile < 400; ++of_tile) {
      const int count = parts.count(of_tile);
      int least = of_tile;
      int most = 0;
      for (int part = 0; part < count; ++part) {
        const int of_part = KeyTileParts::first(of_tile, part + 1, count) - KeyTileParts::first(of_tile, part, count);
        least = of_part < least ? of_part : least;
        most = of_part > most ? of_part : most;
      }
      const bool is_whole = KeyTileParts::first(of_tile, 0, count) == 0 &&
                            KeyTileParts::first(of_tile, count, count) == of_tile && most - least <= 1;
      const bool fits = count == 1 ? 2 * of_tile < 3 * iterations + 1 : 2 * least + 2 > iterations;
      if (is_whole && fits) continue;
      std::printf("%d iterations in parts of %d: %d parts of %d to %d\n", of_tile, iterations, count, least, most);
      return false;
    }
  }
  // 16 heads of 32768 tokens on 132 CTAs: a causal call is not divided, and global tokens beside a window are.
  constexpr int64_t kTiles = 16 * 256;
  const auto iterations_of_part = [](int64_t mean) { return KeyTileParts::of(mean * kTiles, kTiles, 132).iterations; };
  return KeyTileParts{iterations_of_part(257)}.count(512) == 1 && iterations_of_part(11) == 42 &&
         KeyTileParts::of(0, 0, 132).count(0) == 1;
}

}  // namespace

int main() {
  if (!parts_are_right()) return 1;
  const bool groups_are_right =
      groups_are(32768, 64, Selection::kBlocks, 2, 8) && groups_are(32768, 128, Selection::kBlocks, 2, 4) &&
      groups_are(8192, 64, Selection::kBlocks, 8, 0) && groups_are(8192, 128, Selection::kBlocks, 8, 0) &&
      groups_are(32768, 128, Selection::kIntervals, 2, 16) && groups_are(32768, 128, Selection::kCausal, 2, 0);
  if (!groups_are_right) return 1;
  // Heads of 32768 tokens, on 132 CTAs: global tokens that see everything, beside a window of 512; documents of 4096. A
  // causal head of 8192 tokens, and one of 4096 on few keys of a window.
  const auto waits = [](const LoopOrder::Head& head) { return LoopOrder::has_long_queue(head, 1, 132); };
  if (!waits({5400, 512, 256}) || waits({8448, 512, 33}) || waits({64 * 65, 128, 64}) || waits({32 * 18, 64, 10})) {
    return 1;
  }
  std::mt19937 random(1);
  int with_query_shares = 0;
  int with_cyclic_lists = 0;
  for (int i = 0; i < 3000; ++i) {
    const Problem problem = random_problem(random);
    if (!ranks_are_right(problem) || !ends(problem, random)) return 1;
    if (problem.order.shares_query_tiles()) ++with_query_shares;
    if (problem.lists_existing && problem.order.cyclic) ++with_cyclic_lists;
  }
  return with_query_shares >= 30 && with_cyclic_lists >= 20 ? 0 : 1;
}
