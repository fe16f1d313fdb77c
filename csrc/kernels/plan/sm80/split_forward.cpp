// Plans split-KV and its combine kernel.
#include "attention/division.h"
#include "kernels/config/combine.h"
#include "kernels/config/split.h"
#include "kernels/plan/plan.h"
#include "kernels/plan/sm80/sm80.h"
#include "kernels/plan/sm80/split.h"

namespace flash_attn_ext::plan {
namespace {

// The thresholds of this file were measured: docs/kernels/log/split.md, "Figures behind constants".

// Up to this number of packed rows, reading the keys bounds a call. Up to this number of queries it does so with any
// number of heads in a group: tiles of other kernels, each of one head, would be nearly empty.
constexpr int64_t kSplitRows = 64;
constexpr int64_t kQueriesOfManyHeads = 16;

// Kernels append new keys themselves up to this number of rows of k_new, v_new and q. With more rows, a launch of its
// own (common/cache/append_kv.h) is a small part of the call.
constexpr int64_t kAppendedRows = 4096;

// Up to these numbers of rows, each row has a CTA that combines its splits. They are so few that all CTAs run at once
// or, where a row has at least kManySplits splits, in a few waves. With more rows, each row has a warp.
constexpr int64_t kCombinedRows = 256;
constexpr int64_t kCombinedRowsOfManySplits = 1024;
constexpr int64_t kManySplits = 8;

// Up to this number of combine CTAs per SM, all of them are resident while keys are still read. They then execute their
// instructions once before they wait, so that these are cached (common/sums/combine.cu).
constexpr int64_t kWarmUpCtas = 2;

int64_t packed_rows(const attention::ForwardParams& p) { return p.sequences.max_seqlen_q * p.queries_per_key_head(); }

// CTAs number tiles of scores, which have at least 16 rows and 32 keys, in 32 bits.
bool numbers_fit(const attention::ForwardParams& p) {
  const int64_t tiles = p.batch * p.num_heads_k * (packed_rows(p) / 16 + 1) * (p.sequences.max_seqlen_k / 32 + 1);
  return 2 * tiles < int64_t{1} << 31;
}

// The CTAs per SM that keep memory busy where the keys of a work tile are split. More CTAs make more splits. That pays
// where scores take work of their own, and CTAs still have several key tiles each. If each of two CTAs would have fewer
// key tiles than kTilesOfShort, one is as fast or faster (docs/kernels/log/split.md, "Figures behind constants").
constexpr int64_t kCtasOfSplitKv = 2;
constexpr int64_t kCtasOfLongGeneric = 3;
constexpr int64_t kTilesOfLong = 4;
constexpr int64_t kTilesOfShort = 8;

int64_t ctas_of_split_kv(int64_t tiles, bool generic, int64_t sms) {
  const bool long_generic = generic && tiles >= sms * kCtasOfLongGeneric * kTilesOfLong;
  return sms * (long_generic ? kCtasOfLongGeneric : kCtasOfSplitKv);
}

// Returns as many CTAs as there is room for or, where work tiles are fewer, a multiple of their number. Work tiles of
// the same length then have CTAs of their own, and no range ends one and begins another. few_splits: this many splits
// are combined faster than slightly more.
int64_t persistent_ctas(int64_t work_tiles, int64_t most_splits, int64_t few_splits, int64_t room, int64_t wanted) {
  if (work_tiles == 0) return 1;
  if (work_tiles >= room) return room;
  const int64_t splits = std::clamp<int64_t>(wanted / work_tiles, 1, std::min(most_splits, room / work_tiles));
  const bool has_few_more = splits > few_splits && splits <= few_splits + few_splits / 8;
  return work_tiles * (has_few_more ? few_splits : splits);
}

// Chooses which warps combine the splits of `rows` rows.
void plan_combine(ForwardPlan& plan, int64_t work_tiles, int64_t rows, const Limits& limits) {
  const int64_t splits = plan.persistent_ctas / std::max<int64_t>(work_tiles, 1);
  const bool has_block = rows <= (splits >= kManySplits ? kCombinedRowsOfManySplits : kCombinedRows);
  const bool has_few_splits = splits <= common::splits_of_few_warps(plan.tile.columns);
  if (has_block) plan.combine_warps = has_few_splits ? common::kFewCombineWarps : common::kCombineWarps;
  const int64_t blocks = has_block ? rows : attention::ceil_div(rows, common::kRowsOfCombineCta);
  plan.combine_warms_up = blocks <= kWarmUpCtas * limits.sms;
}

// The CTAs for new keys and values, and for q where it is rotated. Each row has a warp. Where SMs have room for more
// CTAs, they are few, because more would spread the CTAs that attend less evenly over SMs (docs/kernels/log/split.md,
// "Figures behind constants"). Where there is no room they come last, and are short.
int64_t append_ctas(const attention::ForwardParams& p, const ForwardPlan& plan, const Limits& limits) {
  const int64_t queries = p.batch * p.sequences.max_seqlen_q * p.num_heads_q;
  const int64_t rows = 2 * p.batch * p.cache.num_new * p.num_heads_k + queries;
  if (p.cache.num_new == 0 || queries == 0 || rows > kAppendedRows) return 0;
  const int64_t wanted = attention::ceil_div(rows, plan.tile.warps);
  const bool has_room = plan.persistent_ctas < limits.sms * plan.tile.ctas_per_sm;
  return has_room ? std::clamp<int64_t>(limits.sms / 2, 1, wanted) : wanted;
}

}  // namespace

bool is_bound_by_keys(const attention::ForwardParams& p) {
  if (p.cache.present()) return true;
  const bool has_few_rows = packed_rows(p) <= kSplitRows || p.sequences.max_seqlen_q <= kQueriesOfManyHeads;
  return has_few_rows && visible_keys(p) >= kSplitKeys && numbers_fit(p);
}

bool leaves_sms_idle(const attention::ForwardParams& p, int tile_queries, const Limits& limits) {
  if ((p.sequences.max_seqlen_q > kSplitQueries && !p.cache.present()) || !numbers_fit(p)) return false;
  const int64_t blocks = p.batch * p.num_heads_q * attention::ceil_div(p.sequences.max_seqlen_q, tile_queries);
  return 2 * blocks <= limits.sms && visible_keys(p) >= 2 * kSplitKeys;
}

int64_t kv_splits(const attention::ForwardParams& p, int64_t blocks, const Limits& limits) {
  const int64_t most = std::max<int64_t>(visible_keys(p) / kSplitKeys, 1);
  return std::clamp<int64_t>(limits.sms / std::max<int64_t>(blocks, 1), 1, most);
}

ForwardPlan plan_split_forward(const attention::ForwardParams& p, const Limits& limits) {
  ForwardPlan plan;
  plan.row_max = p.row_max.present();
  const bool generic = score_kind(p.score_mod) != ScoreKind::kScale || p.dropout.enabled();
  plan.kernel = ForwardKernel::kSplit;
  plan.score = generic ? ScoreMode::kGeneric : ScoreMode::kScaleOnly;
  plan.row = sm80::split_row(element_bytes(p), largest_head_dim(p), plan.score, packed_rows(p));
  const sm80::SplitConfig& config = sm80::kSplitConfigs[plan.row];
  plan.head_dim = config.head_dim;
  const sm80::SplitTile& tile = config.tile;
  plan.tile = {.queries = tile.rows,
               .keys = tile.keys,
               .warps = tile.row_warps * tile.key_warps,
               .columns = tile.columns,
               .ctas_per_sm = tile.ctas_per_sm,
               .stages = tile.stages};
  plan.nan_repair = NanRepair::kInKernel;
  const int64_t work_tiles =
      p.batch * p.num_heads_k * attention::ceil_div(packed_rows(p), tile.rows) * num_slices(p.head_dim_v, tile.columns);
  const int64_t most_splits = std::max<int64_t>(visible_keys(p) / kLeastKeysOfCta, 1);
  const int64_t tiles = work_tiles * attention::ceil_div(visible_keys(p), tile.keys);
  const auto blocks = [&](int64_t wanted) {
    const int64_t room = limits.sms * tile.ctas_per_sm;
    return persistent_ctas(work_tiles, most_splits, common::splits_of_few_warps(tile.columns), room, wanted);
  };
  plan.persistent_ctas = blocks(ctas_of_split_kv(tiles, generic, limits.sms));
  if (!generic && tiles < limits.sms * kCtasOfSplitKv * kTilesOfShort) {
    const int64_t one_each = blocks(limits.sms);
    if (4 * one_each >= 3 * limits.sms) plan.persistent_ctas = one_each;
  }
  if (config.appends_keys) plan.append_ctas = append_ctas(p, plan, limits);
  const int64_t rows = work_tiles * std::min<int64_t>(tile.rows, packed_rows(p));
  plan_combine(plan, work_tiles, rows, limits);
  const int64_t slots = plan.persistent_ctas * 2;
  plan.workspace.split_rows = append(plan.workspace.bytes, slots * tile.rows * tile.columns * 4);
  plan.workspace.split_states = append(plan.workspace.bytes, slots * tile.rows * 8);
  plan.workspace.split_list = append(plan.workspace.bytes, work_tiles * 12);
  return plan;
}

}  // namespace flash_attn_ext::plan
