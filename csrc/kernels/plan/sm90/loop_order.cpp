// Plans the loop order of Hopper's key-stationary backward kernel (schedule/loop_order.h).
#include "kernels/schedule/loop_order.h"

#include <algorithm>

#include "attention/division.h"
#include "kernels/config/key_stationary.h"
#include "kernels/plan/plan.h"
#include "kernels/plan/sm80/sm80.h"
#include "kernels/plan/sm90/sm90.h"

namespace flash_attn_ext::plan {
namespace {

using attention::BackwardParams;

// The thresholds of this file were measured: docs/kernels/log/sm90_backward.md, "Figures behind constants" and "Few
// keys of many queries".

// In split-KV, an upper bound on (iterations of a key tile) * (accumulators of dQ) / (key tiles in flight). More
// accumulators take memory.
constexpr int64_t kMostSummedIterations = 8;
// In split-KV, the least key tiles in flight for each accumulator of dQ, if a key tile has several iterations.
// Contributors then spread by themselves, and L2 holds the smaller number of accumulators.
constexpr int64_t kMostSharingTiles = 2;

// Up to how many query heads of a KV group one CTA loops over where tiles of keys see different numbers of queries.
// More than one saves the sum of their dK and dV, but the CTAs drift apart, and L2 no longer holds what they share.
int64_t most_drifting_heads(sm90::HeadDims dims, int64_t query_tiles) {
  if (query_tiles <= 8) return dims.qk <= 64 ? 4 : 8;
  return query_tiles <= (dims.qk <= 64 ? 32 : 16) ? 2 : 1;
}

// How many waves the key tiles of an L2 head group in one loop direction (schedule/loop_order.h) fill at most. More
// waves balance tiles of different length; fewer keep more of the group in L2.
double head_group_waves(sm90::HeadDims dims, int64_t query_tiles) {
  if (query_tiles >= 16) return 2;
  return dims.qk <= 64 ? 1.5 : 1;
}

// How many pairs of one loop direction, at least, an L2 head group has where a mask makes key tiles wait for each
// other. Key tiles in flight then belong to more heads, so that fewer of them add to the same query tile. With lists of
// blocks, L2 would not hold what more pairs read; with other masks, more pairs than these gain little
// (docs/kernels/log/sm90_backward.md, "Key tiles of sparse lists" and "Global tokens that see everything"). 0: the
// pairs of a group never change. A packed batch may be of sequences that have little in common.
int64_t least_waiting_pairs(const BackwardParams& p, sm90::HeadDims dims) {
  if (p.score_mod.blocks.present()) return dims.qk <= 64 ? 4 : 2;
  return p.score_mod.hides_keys() && !is_packed(p) ? 8 : 0;
}

// Into how many shares the query heads of a KV group are divided. A share has as many heads as a CTA may loop over.
uint32_t count_kv_group_shares(int64_t group, sm90::HeadDims dims, int64_t query_tiles) {
  int64_t heads = std::min(group, most_drifting_heads(dims, query_tiles));
  while (group % heads != 0) --heads;
  return static_cast<uint32_t>(group / heads);
}

// Doubles the phases as long as wants_more().
template <class WantsMore>
void add_phases(LoopOrder& order, WantsMore&& wants_more) {
  while (order.phase_tiles > 1 && wants_more()) {
    ++order.log2_phases;
    order.phase_tiles = (order.tiles + (1u << order.log2_phases) - 1) >> order.log2_phases;
  }
}

// Whether cyclic phases leave CTAs over while phases of half the size do not. A CTA that is left over holds a tile of a
// phase whose other tiles are fetched only when the other CTAs have finished theirs. This matters in the first waves,
// at small head dims (docs/kernels/log/sm90_backward.md, "Figures behind plans").
bool leaves_blocks_over(const LoopOrder& order, sm90::HeadDims dims, int64_t blocks) {
  constexpr int64_t kFirstRounds = 8;
  const int64_t tiles = int64_t{order.pairs} * order.tiles;
  const bool has_few_rounds = tiles > blocks && tiles <= kFirstRounds * blocks;
  return dims.qk <= 64 && has_few_rounds && order.phase_tiles % 2 == 0 && blocks % order.phase_tiles != 0 &&
         blocks % (order.phase_tiles / 2) == 0;
}

// The pairs of an L2 head group, every second of which is descending: up to `most` of each loop direction, or fewer, so
// that the last group is about as large as the others.
uint32_t pairs_of_head_group(const LoopOrder& order, int64_t most) {
  const int64_t couples = (int64_t{order.pairs} + 1) / 2;
  return static_cast<uint32_t>(2 * attention::even_share(couples, most));
}

// Sets the phases of a cyclic order with this many query tiles in a share.
void add_phases_of_cycle(LoopOrder& order, sm90::HeadDims dims, int64_t query_tiles, int64_t blocks) {
  // Neighbouring contributors of a query tile are as many iterations apart as in a causal call.
  constexpr int64_t kApart = LoopOrder::kKeys / LoopOrder::kQueries;
  add_phases(order, [&] {
    return order.phase_tiles > blocks || query_tiles < kApart * order.phase_tiles ||
           leaves_blocks_over(order, dims, blocks);
  });
  order.head_group_pairs = static_cast<uint32_t>(std::max<int64_t>(blocks / order.phase_tiles, 1));
}

// Estimates the critical path of a cyclic order, in iterations. query_tiles: of a head.
double cost_of_cycle(LoopOrder order, const BackwardParams& p, int64_t query_tiles, int64_t blocks) {
  constexpr double kCostOfTile = 5;   // beside its iterations
  constexpr double kCostOfSum = 0.5;  // of the partial dK and dV of one share
  constexpr double kWithoutL2 = 1.25;
  constexpr double kL2Bytes = 50 << 20;  // of an H100 and an H200
  const sm90::HeadDims dims = sm90::key_stationary_head_dims(p.head_dim_qk, p.head_dim_v);
  const int64_t of_share = attention::ceil_div(query_tiles, order.kv_group_shares);
  order.pairs *= order.kv_group_shares;
  add_phases_of_cycle(order, dims, query_tiles / order.kv_group_shares, blocks);
  const int64_t pairs_at_once = order.head_group_pairs;
  const int64_t rounds = attention::ceil_div(order.pairs, pairs_at_once) << order.log2_phases;
  // Bytes of dQ accumulators, Q and dO of the shares in flight. With a single key tile, dQ is not accumulated in
  // memory.
  const int64_t in_flight = std::min<int64_t>(order.pairs, pairs_at_once);
  const double bytes = static_cast<double>(in_flight * of_share * LoopOrder::kQueries * 4 * (dims.qk + dims.v));
  const double factor = order.tiles > 1 && bytes > kL2Bytes ? kWithoutL2 : 1;
  const double iterations = factor * static_cast<double>(of_share * p.queries_per_key_head());
  return static_cast<double>(rounds) * (iterations + kCostOfTile) + kCostOfSum * order.kv_group_shares;
}

// Into how many shares a head's query tiles are divided where every query sees every key. Few key tiles, as those of a
// text that an image attends to, would leave CTAs idle. The memory of their sums is bounded here, and not by the
// workspace of materialised scores.
uint32_t count_query_shares(const LoopOrder& whole, const BackwardParams& p, int64_t query_tiles, int64_t blocks) {
  constexpr int64_t kMostKeyTiles = 8;  // of a head
  constexpr int64_t kLeastQueryTiles = 4;
  constexpr int64_t kMostSumBytes = 128 << 20;
  if (whole.pairs == 0 || whole.tiles == 0 || whole.tiles > kMostKeyTiles) return 1;
  const sm90::HeadDims dims = sm90::key_stationary_head_dims(p.head_dim_qk, p.head_dim_v);
  const int64_t sum_bytes = whole.pairs * partial_sums_bytes(whole, dims);
  // With shorter shares, the key tiles of a head would wait for each other's dQ.
  const int64_t shortest = std::max<int64_t>(2 * whole.tiles, kLeastQueryTiles);
  const int64_t most = std::min(query_tiles / shortest, kMostSumBytes / sum_bytes);
  uint32_t best = 1;
  // Sums take memory, so shares must save at least a tenth.
  double least = 0.9 * cost_of_cycle(whole, p, query_tiles, blocks);
  for (LoopOrder order = whole; ++order.kv_group_shares <= most;) {
    const double cost = cost_of_cycle(order, p, query_tiles, blocks);
    if (cost >= least) continue;
    least = cost;
    best = order.kv_group_shares;
  }
  return best;
}

}  // namespace

LoopOrder loop_order(const attention::BackwardParams& p, int64_t blocks, int64_t query_tiles) {
  const sm90::HeadDims dims = sm90::key_stationary_head_dims(p.head_dim_qk, p.head_dim_v);
  const attention::SequenceTable& lengths = p.sequences;
  const bool selects_keys = p.score_mod.selects_keys();
  LoopOrder order;
  // Where key tiles see different numbers of queries, CTAs that loop over the heads of a KV group drift apart, and L2
  // does not hold what lies between them.
  if (p.visibility.one_sided() || selects_keys)
    order.kv_group_shares = count_kv_group_shares(p.queries_per_key_head(), dims, query_tiles);
  // Heads with masks of their own have different iterations. In descending order all heads of a share iterate over the
  // query tiles together, and so need the same ones.
  if (p.mask_dimensions().heads && (!p.visibility.unlimited() || selects_keys)) {
    order.kv_group_shares = static_cast<uint32_t>(p.queries_per_key_head());
  }
  // A work tile has one sum of dS for each key.
  if (sums_dscores(p) && p.dbias.per_head && !p.visibility.unlimited()) {
    order.kv_group_shares = static_cast<uint32_t>(p.queries_per_key_head());
  }
  order.tiles = static_cast<uint32_t>(LoopOrder::num_tiles(lengths.max_seqlen_k, LoopOrder::kKeys));
  order.split_kv = has_few_queries(p);
  order.cyclic = !order.split_kv && p.visibility.unlimited() && !selects_keys;
  order.pairs = static_cast<uint32_t>(p.batch * p.num_heads_k) * order.kv_group_shares;
  order.phase_tiles = order.tiles;
  if (order.split_kv) {
    const int64_t at_once = std::max<int64_t>(blocks / order.pairs, 1);  // key tiles of a pair in flight
    const int64_t iterations = query_tiles * p.queries_per_key_head() / order.kv_group_shares;
    const int64_t sharing = std::min(iterations, kMostSharingTiles);
    add_phases(order, [&] {
      const int64_t phases = int64_t{1} << order.log2_phases;
      return 2 * phases * sharing <= at_once && phases * iterations < kMostSummedIterations * at_once;
    });
    order.log2_accumulators = order.log2_phases;
  } else if (order.cyclic) {
    // Until here there is one share. The lists of iterations that a mask leaves are those of whole heads.
    if (!p.score_mod.hides_keys()) order.kv_group_shares = count_query_shares(order, p, query_tiles, blocks);
    order.pairs *= order.kv_group_shares;
    add_phases_of_cycle(order, dims, query_tiles / order.kv_group_shares, blocks);
  } else if (!p.visibility.one_sided() && !p.visibility.unlimited() && p.queries_per_key_head() > 1) {
    // All pairs are ascending. In descending order a key tile goes through all heads of its KV group at each query
    // tile, so that L2 would have to hold the queries of all of them; and in a window all key tiles have
    // as many iterations, so that nothing is gained by it.
    order.head_group_pairs = 1;
  } else {
    // As many pairs as fill the CTAs this many times with key tiles of one loop direction.
    const double tiles = head_group_waves(dims, query_tiles) * static_cast<double>(blocks);
    const int64_t most = std::max(static_cast<int64_t>(tiles / order.phase_tiles), int64_t{1});
    order.head_group_pairs = pairs_of_head_group(order, most);
    if (const int64_t least = least_waiting_pairs(p, dims); most < least) {
      order.waiting_group_pairs = static_cast<uint16_t>(pairs_of_head_group(order, least));
    }
  }
  return order;
}

}  // namespace flash_attn_ext::plan
