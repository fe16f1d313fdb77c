// VisitOrder on random problems: a tile of queries is visited by those that see it, once each, in an order without
// gaps; a visit waits only for tiles that were claimed before, or for those of its group; and blocks that claim tiles
// as the kernel does come to an end, however few they are and however long a tile takes. So it is with the visits that
// a mask leaves.
#include "kernels/plan/visit_order.h"

#include <cstdio>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "kernels/plan/mask_visits.h"
#include "kernels/plan/sm90.h"

namespace {

using flash_attn_ext::MaskVisits;
using flash_attn_ext::VisitOrder;
using flash_attn_ext::Walk;
using namespace flash_attn_ext::attention;

struct Problem {
  Visibility visibility;
  std::vector<Sequence> sequences;
  VisitOrder order;
  int blocks;
  int heads;
  bool masked;
  uint32_t hidden;  // visits of 16

  // By a mask that each pair has for itself.
  bool is_left(uint32_t pair, int key_tile, int query_tile) const {
    const uint32_t mixed = ((pair * 8191 + key_tile) * 131071 + query_tile) * 2654435761u;
    return !masked || (mixed >> 20) % 16 >= hidden;
  }

  const Sequence& sequence_of(uint32_t pair) const { return sequences[pair / (heads * order.members)]; }
};

struct Visit {
  int query_tile;
  int sums;  // of the tile of queries, to which the visitor adds
  int place;
  bool is_last = false;  // known with a mask
};

// Sums of dQ: pair, tile of queries, and which of its sums.
using Sums = std::tuple<uint32_t, int, int>;

// What a claimed tile does, as the kernel does it (sm90/backward/copies.cuh).
std::vector<Visit> visits_of(const Problem& problem, const VisitOrder::Claim& claim) {
  const Sequence& sequence = problem.sequence_of(claim.pair);
  if (claim.tile >= VisitOrder::num_tiles(sequence.num_keys, VisitOrder::kKeys) || sequence.num_queries == 0) return {};
  const VisitOrder::Tiles range = VisitOrder::visited(problem.visibility, sequence, claim.tile);
  const VisitOrder::Visitor visitor = problem.order.visitor(problem.visibility, sequence, claim.tile, claim.walk);
  std::vector<Visit> visits;
  if (problem.masked) {  // sm90/backward/mask_visits.cu
    for (int i = 0; i < range.end - range.begin; ++i) {
      const int query_tile = MaskVisits::query_tile(visitor, range, i);
      if (!problem.is_left(claim.pair, claim.tile, query_tile)) continue;
      const MaskVisits::Entry entry = MaskVisits::entry(
          visitor, query_tile, [&](int tile) { return problem.is_left(claim.pair, tile, query_tile) ? 1 : 0; });
      visits.push_back({query_tile, 0, entry.place, entry.is_last != 0});
    }
    return visits;
  }
  const int sums = claim.walk == Walk::kDivide ? visitor.phase() : 0;
  int at = claim.walk == Walk::kCycle     ? visitor.first_of_cycle()
           : claim.walk == Walk::kDescend ? range.end - 1
                                          : range.begin;
  for (int i = range.begin; i < range.end; ++i) {
    visits.push_back({at, sums, visitor.place(at, visitor.visitors(at))});
    at += claim.walk == Walk::kDescend ? -1 : 1;
    if (at == range.end) at = range.begin;
  }
  return visits;
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

bool places_are_right(const Problem& problem) {
  std::map<Sums, std::map<int, uint32_t>> claims_in_place;
  std::set<std::tuple<uint32_t, int, int>> last;
  std::set<std::pair<uint32_t, int>> claimed;
  for (uint32_t index = 0; index < problem.order.num_claims(); ++index) {
    const VisitOrder::Claim claim = problem.order.claim(index);
    if (!claimed.insert({claim.pair, claim.tile}).second) return fails("claimed twice", problem);
    for (const Visit& visit : visits_of(problem, claim)) {
      if (!claims_in_place[{claim.pair, visit.query_tile, visit.sums}].insert({visit.place, index}).second) {
        return fails("two visitors in one place", problem);
      }
      if (visit.is_last) last.insert({claim.pair, visit.query_tile, visit.place});
    }
  }
  for (uint32_t pair = 0; pair < problem.order.pairs; ++pair) {
    const Sequence& sequence = problem.sequence_of(pair);
    for (int i = 0; i < VisitOrder::num_tiles(sequence.num_queries, VisitOrder::kQueries); ++i) {
      const VisitOrder::Tiles visitors =
          problem.order.visitor(problem.visibility, sequence, 0, Walk::kClimb).visitors(i);
      int seen = 0;
      for (int tile = visitors.begin; tile < visitors.end; ++tile) seen += problem.is_left(pair, tile, i) ? 1 : 0;
      int count = 0;
      for (int sums = 0; sums < 1 << problem.order.log2_sums; ++sums) {
        const auto found = claims_in_place.find({pair, i, sums});
        // Sums that nobody adds to are not read (sm90/backward/dq_sums.cuh).
        const bool is_read =
            seen > 0 && (sums - visitors.begin & (1 << problem.order.log2_sums) - 1) < visitors.end - visitors.begin;
        if (is_read != (found != claims_in_place.end())) return fails("sums that nobody adds to", problem);
        if (!is_read) continue;
        uint32_t before = 0;
        int place = 0;
        for (const auto& [at, index] : found->second) {
          if (at != place++) return fails("a place is left out", problem);
          const VisitOrder::Claim claim = problem.order.claim(index);
          if (at > 0 && claim.walk != Walk::kCycle && before > index) return fails("waits for a later claim", problem);
          if (at > 0 && claim.walk == Walk::kCycle && before >= claim.group_end) {
            return fails("waits for a later group", problem);
          }
          before = index;
        }
        count += place;
      }
      if (count != seen) return fails("not everybody visits", problem);
      const auto others = last.lower_bound({pair, i, 0});
      const bool has_last = others != last.end() && *others == std::tuple{pair, i, seen - 1};
      if (problem.masked && has_last != (seen > 0)) return fails("not the last one is last", problem);
    }
  }
  return true;
}

// Blocks take a random number of visits in turn. A block claims its next tile, and starts it, while its last one is
// still at work, as early as the kernel may.
bool ends(const Problem& problem, std::mt19937& random) {
  const uint32_t count = problem.order.num_claims();
  struct Work {
    uint32_t pair;
    uint32_t group_end;
    std::vector<Visit> visits;
    size_t next = 0;
  };
  std::map<Sums, int> done;
  std::vector<std::vector<Work>> blocks(problem.blocks);
  uint32_t claimed = 0;
  const auto claim = [&](std::vector<Work>& block) {
    const VisitOrder::Claim next = problem.order.claim(claimed++);
    block.push_back({next.pair, next.group_end, visits_of(problem, next)});
  };
  for (auto& block : blocks) {
    if (claimed < count) claim(block);
  }
  const auto can_claim = [&](const std::vector<Work>& block) {
    return claimed < count && (block.empty() || (block.size() == 1 && claimed >= block[0].group_end));
  };
  const auto can_go_on = [&](const Work& work) {
    if (work.next == work.visits.size()) return true;
    const Visit& visit = work.visits[work.next];
    return done[{work.pair, visit.query_tile, visit.sums}] == visit.place;
  };
  for (;;) {
    bool anybody = false;
    for (const auto& block : blocks) anybody |= can_claim(block) || (!block.empty() && can_go_on(block[0]));
    if (!anybody) break;
    for (auto& block : blocks) {
      if (random() % 2 == 0 && can_claim(block)) claim(block);
      for (int steps = static_cast<int>(random() % 5); steps > 0 && !block.empty() && can_go_on(block[0]); --steps) {
        Work& work = block[0];
        if (work.next == work.visits.size()) {
          block.erase(block.begin());
        } else {
          const Visit& visit = work.visits[work.next++];
          ++done[{work.pair, visit.query_tile, visit.sums}];
        }
      }
    }
  }
  for (const auto& block : blocks) {
    if (!block.empty()) return fails("nobody can go on", problem);
  }
  return claimed == count || fails("not all is claimed", problem);
}

Problem random_problem(std::mt19937& random) {
  const auto pick = [&](int least, int most) { return least + static_cast<int>(random() % (most - least + 1)); };
  Problem problem;
  const int64_t longest_q = pick(1, 1400);
  const int64_t longest_k = pick(0, 1) ? longest_q : pick(1, 2000);
  const bool packed = pick(0, 2) == 0;
  const int batch = pick(1, 3);
  for (int b = 0; b < batch; ++b) {
    const int64_t queries = packed ? pick(0, static_cast<int>(longest_q)) : longest_q;
    const int64_t keys = packed ? pick(0, static_cast<int>(longest_k)) : longest_k;
    problem.sequences.push_back({b, 0, 0, queries, keys});
  }
  problem.heads = pick(1, 3);
  problem.blocks = pick(1, 12);
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
  problem.order = flash_attn_ext::plan::visit_order(p, problem.blocks);
  problem.masked = !problem.order.divided && pick(0, 1) == 1;
  problem.hidden = pick(0, 15);
  return problem;
}

}  // namespace

int main() {
  std::mt19937 random(1);
  for (int i = 0; i < 3000; ++i) {
    const Problem problem = random_problem(random);
    if (!places_are_right(problem) || !ends(problem, random)) return 1;
  }
  return 0;
}
