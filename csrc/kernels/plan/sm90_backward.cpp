#include "attention/even_share.h"
#include "kernels/plan/mask_visits.h"
#include "kernels/plan/sm80.h"
#include "kernels/plan/sm90.h"
#include "kernels/plan/workspace.h"
#include "kernels/tile_config_storing.h"

namespace flash_attn_ext::plan {
namespace {

using attention::BackwardParams;

// Of few queries: visits of a tile of keys, times phases with sums of their own, by tiles that are at work at once.
// More sums take memory.
constexpr int64_t kMostSummedVisits = 8;
// Likewise, tiles at work at once that add to the same sums. Where a tile has several visits these spread by
// themselves, and fewer sums stay in L2.
constexpr int64_t kMostSharingTiles = 2;

// Visitors of a tile of queries take turns: with far more keys than queries they would wait for each other.
bool has_few_queries(const BackwardParams& p) {
  return p.sequences.max_seqlen_k > sm90::kMostKeysPerQuery * p.sequences.max_seqlen_q;
}

// One kernel for all gradients. With a mask, few queries are for kernels in which nobody takes turns.
bool is_fused(const BackwardParams& p) {
  if (largest_head_dim(p) > sm90::kLargestBackwardHeadDim) return false;
  switch (wanted_variant_sm90(p)) {
    case Variant::kPlain:
    case Variant::kDropout:
      return true;
    case Variant::kMask:
      return !has_few_queries(p);
    case Variant::kBiasMask:
      return !has_few_queries(p) && !p.score_mod.mask.present() && !p.dbias.present();
    default:
      return false;
  }
}

// The copy engine describes no empty tensor.
bool is_empty(const BackwardParams& p) {
  const attention::SequenceTable& lengths = p.sequences;
  return std::min({lengths.max_seqlen_q, lengths.max_seqlen_k, lengths.total_q, lengths.total_k}) == 0;
}

// Calls so short that the portable kernels are faster. Where scores are only scaled that is one kernel for all
// gradients: it is faster with more queries, too, where blocks here would have two tiles of keys, one after the other.
bool is_short(const BackwardParams& p, const Limits& limits) {
  const int64_t queries = p.sequences.max_seqlen_q;
  const int64_t tokens = std::max(queries, visible_keys(p));
  if (largest_head_dim(p) > 64 || tokens > sm90::kShortTokens) return false;
  const int64_t tiles = p.batch * p.num_heads_k * VisitOrder::num_tiles(p.sequences.max_seqlen_k, VisitOrder::kKeys);
  const int64_t waves = (tiles + limits.multiprocessors - 1) / limits.multiprocessors;
  const sm90::PortableBackward portable = sm90::portable_backward(waves);
  switch (wanted_variant_sm90(p)) {
    case Variant::kPlain:
      return queries <= portable.queries || tokens <= portable.tokens;
    case Variant::kMask:
    case Variant::kDropout:
      return false;
    case Variant::kBiasMask:
      return !is_fused(p) && queries <= sm90::kPortableQueries;
    default:
      return true;
  }
}

// Of calls with few queries: whether they are for the portable kernels, which divide the keys of dQ among blocks. Here
// the kernel for all gradients divides them, for as few queries and as many keys as the portable ones do; those that
// store scores leave them together, and are slower for short calls of these head dims.
bool leaves_keys_together(const BackwardParams& p) {
  const int64_t queries = p.sequences.max_seqlen_q;
  if (is_fused(p)) return queries > sm80::kSplitQueries || visible_keys(p) < 2 * sm80::kSplitKeys;
  const int64_t head_dim = largest_head_dim(p);
  return queries <= sm90::kShortTokens && (head_dim <= 64 || head_dim > sm90::kLargestBackwardHeadDim);
}

// Where the portable kernels run instead. Of a call's sizes, it depends on lengths and head dims alone, unless it is
// short.
bool is_for_portable_kernels(const BackwardParams& p, const Limits& limits) {
  if (is_empty(p)) return true;
  if (largest_head_dim(p) > sm90::kLargestStoringHeadDim || p.head_dim_qk == 0 || p.head_dim_v == 0) return true;
  // As in the forward pass.
  const attention::BroadcastView& bias = p.score_mod.bias;
  if (bias.present() && bias.element == attention::ElementType::kFloat32) return true;
  // Gradients that are sums of dS over rows, or need scores again: their kernels are there.
  if (p.dbias.present() && !dbias_may_be_stored(p)) return true;
  if (p.dalibi_slopes != nullptr || p.dsink != nullptr) return true;
  if (p.dq.data == nullptr || (p.dk.data == nullptr && p.dv.data == nullptr)) return true;
  if (p.dout.row_stride == 0) return true;  // which the copy engine does not read
  // What is read and written 16 bytes at a time. Results lie in memory in the order of q's, k's and v's strides.
  constexpr int64_t kChunk = 8;
  const auto in_chunks = [](const attention::MatrixView& view, int64_t columns) {
    return view.data == nullptr || has_whole_chunks(view, columns, kChunk);
  };
  if (!in_chunks(p.out, p.head_dim_v) || !in_chunks(p.dout, p.head_dim_v)) return true;
  if (!in_chunks(p.dq, p.head_dim_qk) || !in_chunks(p.dk, p.head_dim_qk) || !in_chunks(p.dv, p.head_dim_v)) return true;
  return has_few_queries(p) ? leaves_keys_together(p) : is_short(p, limits);
}

// How many claims share the query heads of a group: each has as many as may come one after the other.
uint32_t count_members(int64_t group, sm90::HeadDims dims, int64_t query_tiles) {
  int64_t heads = std::min(group, sm90::most_drifting_heads(dims, query_tiles));
  while (group % heads != 0) --heads;
  return static_cast<uint32_t>(group / heads);
}

// Whether groups of tiles that go round leave some blocks over, and groups of half as many do not: blocks that are left
// over hold tiles of a group whose others are claimed when all the other blocks have done theirs. That shows in the
// first rounds. (H200, head dim 64: 2 x 16 heads of 1024 take 0.85 of the time with half groups, 4 x 16 0.96, 8 x
// 12 1.00, 32 x 16 1.03; larger head dims do not gain.)
bool leaves_blocks_over(const VisitOrder& order, sm90::HeadDims dims, int64_t blocks) {
  constexpr int64_t kFirstRounds = 8;
  const int64_t tiles = int64_t{order.pairs} * order.tiles;
  const bool has_few_rounds = tiles > blocks && tiles <= kFirstRounds * blocks;
  return dims.qk <= 64 && has_few_rounds && order.group % 2 == 0 && blocks % order.group != 0 &&
         blocks % (order.group / 2) == 0;
}

// Pairs of a section, two of which walk opposite ways: sections as large as fill `tiles` places with tiles of the same
// walk, or smaller, so that the last one is about as large as the others.
uint32_t pairs_of_section(const VisitOrder& order, double tiles) {
  const int64_t couples = (int64_t{order.pairs} + 1) / 2;
  const int64_t most = std::max(static_cast<int64_t>(tiles / order.group), int64_t{1});
  return static_cast<uint32_t>(2 * attention::even_share(couples, most));
}

}  // namespace

VisitOrder visit_order(const attention::BackwardParams& p, int64_t blocks) {
  const sm90::HeadDims dims = sm90::backward_head_dims(p.head_dim_qk, p.head_dim_v);
  const attention::SequenceTable& lengths = p.sequences;
  const auto query_tiles = VisitOrder::num_tiles(lengths.max_seqlen_q, VisitOrder::kQueries);
  VisitOrder order;
  // Where tiles of keys see different numbers of queries, those that visit a group's heads one after the other drift
  // apart, and L2 does not hold what lies between them.
  if (p.visibility.one_sided()) order.members = count_members(p.queries_per_key_head(), dims, query_tiles);
  // Heads with masks of their own have different visits, which descending walks cannot take in turn.
  if (p.score_mod.mask.present() && p.score_mod.mask.head_stride != 0 && !p.visibility.unlimited()) {
    order.members = static_cast<uint32_t>(p.queries_per_key_head());
  }
  order.pairs = static_cast<uint32_t>(p.batch * p.num_heads_k) * order.members;
  order.tiles = static_cast<uint32_t>(VisitOrder::num_tiles(lengths.max_seqlen_k, VisitOrder::kKeys));
  order.divided = has_few_queries(p);
  order.cyclic = !order.divided && p.visibility.unlimited();
  order.group = order.tiles;
  const auto add_phases = [&](auto&& wants_more) {
    while (order.group > 1 && wants_more()) {
      ++order.log2_phases;
      order.group = (order.tiles + (1u << order.log2_phases) - 1) >> order.log2_phases;
    }
  };
  if (order.divided) {
    const int64_t at_once = std::max<int64_t>(blocks / order.pairs, 1);  // tiles of a pair
    const int64_t visits = query_tiles * p.queries_per_key_head() / order.members;
    const int64_t sharing = std::min(visits, kMostSharingTiles);
    add_phases([&] {
      const int64_t phases = int64_t{1} << order.log2_phases;
      return 2 * phases * sharing <= at_once && phases * visits < kMostSummedVisits * at_once;
    });
    order.log2_sums = order.log2_phases;
  } else if (order.cyclic) {
    // Neighbouring visitors of a tile of queries are as many visits apart as those of a causal call.
    constexpr int64_t kApart = VisitOrder::kKeys / VisitOrder::kQueries;
    add_phases([&] {
      return order.group > blocks || query_tiles < kApart * order.group || leaves_blocks_over(order, dims, blocks);
    });
    order.together = static_cast<uint32_t>(std::max<int64_t>(blocks / order.group, 1));
  } else {
    order.together = pairs_of_section(order, sm90::section_waves(dims, query_tiles) * static_cast<double>(blocks));
  }
  return order;
}

namespace {

// The lists of visits that a mask leaves grow with queries times keys, also where the mask does not: broadcast along
// queries, or over packed sequences, which have lists of their own.
bool may_list_visits(const BackwardParams& p, const VisitOrder& order, const Limits& limits) {
  const attention::BroadcastView& mask = p.score_mod.mask;
  if (!mask.present()) return true;
  if (!MaskVisits::may_be_numbered(p, order)) return false;
  const bool is_a_share_of_the_mask = mask.query_stride != 0 && (!is_packed(p) || mask.batch_stride != 0);
  return is_a_share_of_the_mask || MaskVisits::bytes(p, order) <= limits.max_stored_bytes;
}

BackwardPlan plan_fused(const BackwardParams& p, const VisitOrder& order, const Limits& limits) {
  BackwardPlan plan;
  const sm90::HeadDims dims = sm90::backward_head_dims(p.head_dim_qk, p.head_dim_v);
  plan.kernels = BackwardKernels::kWarpSpecialised;
  plan.delta = DeltaSource::kFirstKernel;
  plan.dq_head_dim = plan.dkdv_head_dim = dims.qk;
  plan.dq_variant = plan.dkdv_variant = wanted_variant_sm90(p);
  plan.nan_repair = NanRepair::kOwnLaunch;
  plan.l2_bytes = limits.l2_bytes;
  plan.resident_blocks = limits.multiprocessors;
  plan.order = order;
  const int64_t longest = VisitOrder::num_tiles(p.sequences.max_seqlen_q, VisitOrder::kQueries);
  const sm90::BackwardForm form = sm90::backward_form(
      dims, {.variant = plan.dkdv_variant, .query_tiles = longest, .key_tiles = order.tiles, .cyclic = order.cyclic});
  plan.announces_visits = form.announces_visits;
  plan.adds_statistics = form.adds_statistics;
  // A packed sequence begins at a tile of its own.
  plan.query_tiles_of_head = is_packed(p) ? p.sequences.total_q / VisitOrder::kQueries + p.batch : p.batch * longest;
  const int64_t query_tiles = p.num_heads_q * plan.query_tiles_of_head;
  const int64_t rows = query_tiles * VisitOrder::kQueries;
  constexpr int64_t kFloat = sizeof(float);
  BackwardPlan::Workspace& parts = plan.workspace;
  parts.delta = append(parts.bytes, statistic_bytes(p));
  if (p.score_mod.mask.present()) parts.mask_bits = append(parts.bytes, MaskVisits::bytes(p, plan.order));
  parts.dq_sums = append(parts.bytes, (rows * dims.qk * kFloat) << plan.order.log2_sums);
  parts.statistics = append(parts.bytes, rows * kBackwardStatistics * kFloat);
  parts.turns = append(parts.bytes, (query_tiles * int64_t{sizeof(int)}) << plan.order.log2_sums);
  parts.key_tiles = append(parts.bytes, plan.order.num_claims() * VisitOrder::kWorkBytes);
  parts.claims = append(parts.bytes, int64_t{sizeof(uint32_t)});
  parts.dq_nan_flags = append(parts.bytes, p.batch * p.num_heads_q * longest * 4);
  const int64_t key_tiles = p.batch * p.num_heads_k * plan.order.tiles;
  parts.dkdv_nan_flags = append(parts.bytes, key_tiles * 4 * VisitOrder::kParts);
  if (plan.order.members > 1) {
    // A packed sequence begins at a tile of its own here, too.
    const int64_t sums = is_packed(p) ? p.num_heads_k * (p.sequences.total_k / VisitOrder::kKeys + p.batch) : key_tiles;
    parts.arrivals = append(parts.bytes, sums * VisitOrder::kParts * int64_t{sizeof(int)});
    const int64_t keys = sums * plan.order.members * VisitOrder::kKeys;
    parts.key_sums = append(parts.bytes, keys * (dims.qk + dims.v) * kFloat);
  }
  return plan;
}

}  // namespace

BackwardPlan plan_backward_sm90(const BackwardParams& p, const Limits& limits) {
  if (is_for_portable_kernels(p, limits)) return plan_backward_sm80(p, limits);
  if (keeps_queries(p)) return plan_backward_few_queries(p, limits);
  if (is_fused(p)) {
    const VisitOrder order = visit_order(p, limits.multiprocessors);
    if (may_list_visits(p, order, limits)) return plan_fused(p, order, limits);
  }
  const std::optional<BackwardPlan> storing = plan_backward_sm90_storing(p, limits);
  return storing ? *storing : plan_backward_sm80(p, limits);
}

}  // namespace flash_attn_ext::plan
