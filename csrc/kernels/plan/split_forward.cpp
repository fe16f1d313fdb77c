#include "kernels/plan/sm80.h"
#include "kernels/plan/split.h"
#include "kernels/plan/workspace.h"

namespace flash_attn_ext::plan {
namespace {

int64_t packed_rows(const attention::ForwardParams& p) { return p.sequences.max_seqlen_q * p.queries_per_key_head(); }

// Blocks number tiles of scores in 32 bits: of at least 16 rows and 32 keys.
bool numbers_fit(const attention::ForwardParams& p) {
  const int64_t tiles = p.batch * p.num_heads_k * (packed_rows(p) / 16 + 1) * (p.sequences.max_seqlen_k / 32 + 1);
  return 2 * tiles < int64_t{1} << 31;
}

// Blocks of a multiprocessor that keep memory busy, where an item's keys are divided. More would leave more parts,
// which pays where scores take work of their own, and blocks have several tiles of keys nevertheless. With fewer tiles
// than kTilesOfShort for each of two, one block is as fast or faster (H100, 32 query and 8 key heads, time by that of
// two: B1 4k to 16k 0.97 to 0.98, with 8 queries 0.92 to 0.95; B4 1k to 4k 0.98, with 8 queries 0.75 to 0.87).
constexpr int64_t kBlocksOfDivided = 2;
constexpr int64_t kBlocksOfLongExtended = 3;
constexpr int64_t kTilesOfLong = 4;
constexpr int64_t kTilesOfShort = 8;

int64_t blocks_of_divided(int64_t tiles, bool extended, int64_t multiprocessors) {
  const bool long_extended = extended && tiles >= multiprocessors * kBlocksOfLongExtended * kTilesOfLong;
  return multiprocessors * (long_extended ? kBlocksOfLongExtended : kBlocksOfDivided);
}

// As many as there is room for. Where items are fewer, a multiple of them: items of one length are then divided among
// blocks of their own, and none ends one item and begins another. few_parts: joined faster than a few more.
int64_t resident_blocks(int64_t items, int64_t most_parts, int64_t few_parts, int64_t room, int64_t wanted) {
  if (items == 0) return 1;
  if (items >= room) return room;
  const int64_t parts = std::clamp<int64_t>(wanted / items, 1, std::min(most_parts, room / items));
  const bool has_few_more = parts > few_parts && parts <= few_parts + few_parts / 8;
  return items * (has_few_more ? few_parts : parts);
}

// Who joins the parts of `rows` rows.
void plan_joining(ForwardPlan& plan, int64_t items, int64_t rows, const Limits& limits) {
  const int64_t parts = plan.resident_blocks / std::max<int64_t>(items, 1);
  const bool has_block = rows <= (parts >= sm80::kManyParts ? sm80::kJoinedRowsOfManyParts : sm80::kJoinedRows);
  const bool has_few_parts = parts <= sm80::parts_of_few_warps(plan.tile.columns);
  if (has_block) plan.joining_warps = has_few_parts ? sm80::kFewJoiningWarps : sm80::kJoiningWarps;
  const int64_t blocks = has_block ? rows : sm80::num_tiles(rows, sm80::kRowsOfJoiningBlock);
  plan.join_rehearses = blocks <= sm80::kRehearsingBlocks * limits.multiprocessors;
}

// For new keys and values, and for q where it is rotated, a warp for each row. Where multiprocessors have room for more
// blocks, few of them: with 192 of them instead of 66 beside 256 others, those that attend were spread less evenly over
// multiprocessors (16 sequences of 8192 keys, 155 us and 138). Where there is none they come last, and are short.
int64_t append_blocks(const attention::ForwardParams& p, const ForwardPlan& plan, const Limits& limits) {
  const int64_t queries = p.batch * p.sequences.max_seqlen_q * p.num_heads_q;
  const int64_t rows = 2 * p.batch * p.cache.num_new * p.num_heads_k + queries;
  if (p.cache.num_new == 0 || queries == 0 || rows > sm80::kAppendedRows) return 0;
  const int64_t wanted = sm80::num_tiles(rows, plan.tile.warps);
  const bool has_room = plan.resident_blocks < limits.multiprocessors * plan.tile.blocks;
  return has_room ? std::clamp<int64_t>(limits.multiprocessors / 2, 1, wanted) : wanted;
}

}  // namespace

bool is_bound_by_keys(const attention::ForwardParams& p) {
  if (p.cache.present()) return true;
  return packed_rows(p) <= sm80::kSplitRows && visible_keys(p) >= sm80::kSplitKeys && numbers_fit(p);
}

bool leaves_multiprocessors_idle(const attention::ForwardParams& p, int tile_queries, const Limits& limits) {
  if (p.sequences.max_seqlen_q > sm80::kSplitQueries || !numbers_fit(p)) return false;
  const int64_t blocks = p.batch * p.num_heads_q * sm80::num_tiles(p.sequences.max_seqlen_q, tile_queries);
  return 2 * blocks <= limits.multiprocessors && visible_keys(p) >= 2 * sm80::kSplitKeys;
}

int64_t key_parts(const attention::ForwardParams& p, int64_t blocks, const Limits& limits) {
  return std::clamp<int64_t>(limits.multiprocessors / std::max<int64_t>(blocks, 1), 1,
                             visible_keys(p) / sm80::kSplitKeys);
}

ForwardPlan plan_split_forward(const attention::ForwardParams& p, const Limits& limits) {
  ForwardPlan plan;
  const int bytes = element_bytes(p);
  const bool extended = score_kind(p.score_mod) != ScoreKind::kScale || p.dropout.enabled();
  plan.kernel = ForwardKernel::kSplit;
  plan.head_dim = sm80::split_head_dim_bucket(bytes, largest_head_dim(p));
  plan.split_kind = sm80::split_kind(bytes, plan.head_dim, packed_rows(p), extended);
  const sm80::SplitTile tile = sm80::split_tile(bytes, plan.head_dim, plan.split_kind);
  plan.tile = {.queries = tile.rows,
               .keys = tile.keys,
               .warps = tile.row_warps * tile.key_warps,
               .columns = tile.columns,
               .blocks = tile.blocks,
               .stages = tile.stages};
  plan.nan_repair = NanRepair::kInKernel;
  const int64_t items = p.batch * p.num_heads_k * sm80::num_tiles(packed_rows(p), tile.rows) *
                        sm80::num_slices(p.head_dim_v, tile.columns);
  const int64_t most_parts = std::max<int64_t>(visible_keys(p) / sm80::kLeastKeysOfBlock, 1);
  const int64_t tiles = items * sm80::num_tiles(visible_keys(p), tile.keys);
  const auto blocks = [&](int64_t wanted) {
    const int64_t room = limits.multiprocessors * tile.blocks;
    return resident_blocks(items, most_parts, sm80::parts_of_few_warps(tile.columns), room, wanted);
  };
  plan.resident_blocks = blocks(blocks_of_divided(tiles, extended, limits.multiprocessors));
  if (!extended && tiles < limits.multiprocessors * kBlocksOfDivided * kTilesOfShort) {
    const int64_t one_each = blocks(limits.multiprocessors);
    if (4 * one_each >= 3 * limits.multiprocessors) plan.resident_blocks = one_each;
  }
  if (sm80::appends_keys(bytes, plan.split_kind)) plan.append_blocks = append_blocks(p, plan, limits);
  const int64_t rows = items * std::min<int64_t>(tile.rows, packed_rows(p));
  plan_joining(plan, items, rows, limits);
  const int64_t slots = plan.resident_blocks * 2;
  plan.workspace.part_rows = append(plan.workspace.bytes, slots * tile.rows * tile.columns * 4);
  plan.workspace.part_states = append(plan.workspace.bytes, slots * tile.rows * 8);
  plan.workspace.part_list = append(plan.workspace.bytes, items * 12);
  return plan;
}

}  // namespace flash_attn_ext::plan
