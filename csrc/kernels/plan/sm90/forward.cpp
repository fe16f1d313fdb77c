// Plans Hopper's forward pass.
#include <algorithm>
#include <cmath>
#include <optional>

#include "attention/aligned_bias.h"
#include "attention/division.h"
#include "attention/key_bias.h"
#include "attention/key_interval.h"
#include "attention/packed_heads.h"
#include "kernels/config/combine.h"
#include "kernels/config/sm90_forward.h"
#include "kernels/plan/mask_tiles.h"
#include "kernels/plan/plan.h"
#include "kernels/plan/sm80/sm80.h"
#include "kernels/plan/sm80/split.h"
#include "kernels/plan/sm90/sm90.h"
#include "kernels/schedule/existing_tiles.h"
#include "kernels/schedule/relative_bias_boxes.h"

namespace flash_attn_ext::plan {
namespace {

using sm90::ForwardConfig;
using sm90::RowKind;

constexpr int kWarpgroupRows = 64;

// The thresholds of this file were measured: docs/kernels/log/sm90.md, "Figures behind constants".

// Up to this number of visible keys the portable kernels are faster, where scores are only scaled and no single-tile
// kernel runs: tiles of this backend would be so empty that several small CTAs per SM do more.
constexpr int64_t kPortableKeys = 96;
// Up to this number of keys, which are one tile, a key bias is not searched for intervals: that would take longer.
constexpr int64_t kMostUnscannedKeys = 128;
// Calls with at most kPortableTokens queries and keys take the portable kernels up to head dim 64, except with ALiBi
// alone. Up to kLargestShortHeadDim they do if their scores are only scaled (docs/kernels/log/sm90.md, "Short calls
// above head dim 64"), unless a single-tile kernel takes them, up to kLargestShortSingleTileHeadDim.
constexpr int64_t kLargestShortHeadDim = 256;
constexpr int64_t kLargestShortSingleTileHeadDim = 128;
// Up to this number of queries, reading the keys bounds a call, and the portable split-KV kernel runs. With more
// queries, this backend's tiles are at least half full.
constexpr int64_t kQueriesBoundByKeys = 32;
// The same for packed rows of a call with a cache (attention/packed_heads.h).
constexpr int64_t kRowsBoundByKeys = 32;
// With more queries than this, the arithmetic of that kernel takes longer than reading the keys. This backend, whose
// kernels do not split the keys of such calls, is then faster where there are enough heads: more than half as many as
// SMs or, above kKeysOfUnevenHeads visible keys, as many as fill three quarters of whole waves.
constexpr int64_t kQueriesOfFewRows = 8;
constexpr int64_t kKeysOfUnevenHeads = 2048;
// Calls without a cache gain from packed heads from these numbers of rows and visible keys on, but not at head dims for
// which only kernels without packed heads have fewer than 128 columns.
constexpr int64_t kLeastPackedRows = 65;
constexpr int64_t kLeastKeysOfPackedHeads = 1024;
constexpr int64_t kMostHeadDimOfFewerColumns = 96;
// Two splits pay from this number of visible keys on, since combining them takes time, or from kSmsOfFewTiles SMs for
// each tile on, where there is little to combine. More splits, each of which has kSplitKeys at least, always do.
constexpr int64_t kKeysOfTwoSplits = 2560;
constexpr int64_t kSmsOfFewTiles = 8;

// Causal calls of up to this number of tokens, and windows of up to this number of keys, have so few key tiles per
// query tile that prologue and epilogue dominate; two CTAs per SM hide each other's. In longer calls the overlap within
// a warpgroup matters more.
constexpr int64_t kTwoCtasTokens = 1536;

// Up to this number of tokens, calls with a key bias in which queries see different keys have tiles of 128 queries at
// head dim 64, and longer ones of 192.
constexpr int64_t kKeyBiasTokensOfFewerQueries = 512;

// Rows of head dims that are no multiples of this do not consist of whole 32-byte sectors. TMA loads of such rows are
// slower and bound a call. Above head dim 64, calls with more keys than kKeysBoundByLoads, or
// kKeysBoundByLoadsOneSided, then load K and V once for 192 queries instead of 128.
constexpr int64_t kWholeSectors = 16;
constexpr int64_t kKeysBoundByLoads = 256;
constexpr int64_t kKeysBoundByLoadsOneSided = 512;

// At head dims from 97 to 128, tiles of 64 keys waste less at the edges of the visible range. They pay for windows of
// up to this number of keys, and for calls that are bounded on one side only and have this number of tokens.
constexpr int64_t kMostKeysOfEdgeWindow = 4097;
constexpr int64_t kLeastEdgeTokensOneSided = 257;
constexpr int64_t kMostEdgeTokensOneSided = 4096;

// The cost of a row of queries in a tile with fewer of them, relative to the tile that it stands in for: fewer rows
// share a read of K and V.
constexpr double kRowCostUpTo64 = 1.2;
constexpr double kRowCostOfKeyBias = 1.4;  // up to head dim 64, too
constexpr double kRowCost = 1.07;
constexpr double kRowCostOfSlowLoads = 1.3;

// By how much the L2 head groups before the last one are smaller than it (schedule.cuh), for a number of query tiles
// per head. In short calls most reads of K and V miss L2. Longest-first order over all heads makes the first wave
// memory-bound and the last one compute-bound, so heads are scheduled in small groups. The last group keeps its size,
// so that a launch ends on the shortest work tiles.
int64_t smaller_head_groups(int64_t query_tiles) { return query_tiles <= 8 ? 8 : 1; }

// For how many heads the last tiles, which have fewer rows, are scheduled last where all tiles see the same keys
// (schedule.cuh). With 192 rows the last tile is often much less work.
int64_t uneven_heads(const ForwardConfig& config, int64_t persistent_ctas) {
  return config.warpgroups == 3 ? persistent_ctas / 4 : 1;
}

// Whether a single-tile kernel runs where the portable kernels otherwise would, since it is faster: at head dims above
// 64, and with ALiBi. It computes keys that a window hides, too.
bool prefers_single_tile(const attention::ForwardParams& p) {
  const bool has_short_alibi = has_only_alibi(p) && p.sequences.max_seqlen_k <= kPortableTokens;
  return (largest_head_dim(p) > 64 || has_short_alibi) && largest_head_dim(p) <= kLargestShortSingleTileHeadDim &&
         takes_single_tile(p);
}

// The score mode of the kernels of a key bias, where they take a call.
std::optional<ScoreMode> key_bias_mode(const attention::ForwardParams& p) {
  if (attention::is_float32_key_bias(p.score_mod.bias)) {
    return may_sum_dscores(p) ? std::optional(ScoreMode::kKeyBias) : std::nullopt;
  }
  return key_bias_score_by_position(p);
}

// Whether tiles would be so empty that the portable kernels are faster.
bool leaves_tiles_empty(const attention::ForwardParams& p, const Limits& limits) {
  const int64_t queries = p.sequences.max_seqlen_q;
  const int64_t keys = visible_keys(p);
  const int64_t tokens = std::max(queries, keys);
  if (p.cache.present()) return false;
  if (largest_head_dim(p) > 64) {
    return tokens <= kPortableTokens && !prefers_single_tile(p) && largest_head_dim(p) <= kLargestShortHeadDim &&
           score_mode_sm90(p, limits) == ScoreMode::kScaleOnly;
  }
  if (tokens <= kPortableTokens) return !prefers_single_tile(p);
  if (takes_single_tile(p)) return false;
  if (key_bias_mode(p) == ScoreMode::kKeyBias) return false;
  if ((key_bias_mode(p) || softcap_or_alibi_score(p)) && !p.row_max.present()) return false;
  switch (score_mode_sm90(p, limits)) {
    case ScoreMode::kScaleOnly:
      return keys <= kPortableKeys || (tokens <= kShortTokens && queries <= kPortableQueries);
    case ScoreMode::kGeneric:
      return tokens <= kShortTokens;
    default:
      return false;
  }
}

// The largest head dim of this backend's split-KV kernels.
constexpr int64_t largest_split_head_dim() {
  int64_t largest = 0;
  for (const ForwardConfig& config : sm90::kForwardConfigs) {
    if (config.split_kv && !config.kv_cache) largest = std::max<int64_t>(largest, config.dims.qk);
  }
  return largest;
}

// Whether CTAs share the keys of a query tile.
bool splits_keys(const attention::ForwardParams& p, int tile_queries, const Limits& limits) {
  if (!leaves_sms_idle(p, tile_queries, limits)) return false;
  const int64_t tiles = p.batch * p.num_heads_q * attention::ceil_div(p.sequences.max_seqlen_q, tile_queries);
  return kv_splits(p, tiles, limits) > 2 || visible_keys(p) >= kKeysOfTwoSplits || kSmsOfFewTiles * tiles <= limits.sms;
}

constexpr int kNoRow = -1;
constexpr int kNumRows = static_cast<int>(std::size(sm90::kForwardConfigs));

// The first row of the table that holds the head dims, suits the call and is wanted.
template <class Predicate>
int find_row(const attention::ForwardParams& p, RowKind kind, Predicate&& is_wanted) {
  for (int row = 0; row < kNumRows; ++row) {
    const ForwardConfig& config = sm90::kForwardConfigs[row];
    if (config.takes(p.head_dim_qk, p.head_dim_v) && config.suits(kind) && is_wanted(config)) return row;
  }
  return kNoRow;
}

// Of calls that need generic kernels in the backward pass, some need less here.
ScoreMode score_mode(const attention::ForwardParams& p, const Limits& limits) {
  if (const std::optional<ScoreMode> of_keys = key_bias_mode(p)) return *of_keys;
  const std::optional<ScoreMode> score = softcap_or_alibi_score(p);
  const auto is_of_score = [&](const ForwardConfig& row) { return row.score == *score; };
  const bool has_row = score && find_row(p, RowKind::kPlain, is_of_score) != kNoRow;
  return has_row ? *score : score_mode_sm90(p, limits);
}

// Whether SMs stay busy where each CTA has all keys of a head.
bool heads_fill_sms(const attention::ForwardParams& p, const Limits& limits) {
  const int64_t heads = p.batch * p.num_heads_q;
  if (visible_keys(p) <= kKeysOfUnevenHeads) return 2 * heads > limits.sms;
  return 4 * heads >= 3 * attention::ceil_div(heads, limits.sms) * limits.sms;
}

// Whether a call with a cache has so many queries that GEMMs bound it. There are kernels for scores that are only
// scaled, which do not write row_max.
bool fills_tiles_of_cache(const attention::ForwardParams& p, const Limits& limits) {
  const int64_t rows = p.sequences.max_seqlen_q * attention::num_packed_heads(p);
  return !p.row_max.present() && rows > kRowsBoundByKeys && score_mode(p, limits) == ScoreMode::kScaleOnly;
}

// Whether packed heads reduce the number of query tiles of a call without a cache by an eighth or more. With fewer rows
// reading the keys bounds the call, and the portable split-KV kernel runs.
bool gains_from_packed_heads(const attention::ForwardParams& p, const Limits& limits) {
  const int64_t queries = p.sequences.max_seqlen_q;
  if (queries > kSplitQueries) return false;
  const int64_t packed_heads = attention::num_packed_heads(p), rows = packed_heads * queries;
  if (packed_heads == 1 || rows < kLeastPackedRows || rows > kSplitQueries) return false;
  const int64_t head_dim = largest_head_dim(p);
  if (head_dim > 64 && head_dim <= kMostHeadDimOfFewerColumns) return false;
  if (p.row_max.present() || visible_keys(p) < kLeastKeysOfPackedHeads) return false;
  if (score_mode(p, limits) != ScoreMode::kScaleOnly) return false;
  const int64_t tile = head_dim <= 64 ? 192 : 128;
  return 8 * attention::ceil_div(rows, tile) <= 7 * packed_heads * attention::ceil_div(queries, tile);
}

// Whether the portable split-KV kernel runs, for few queries of many keys. It reads the keys once for all query heads
// that share them.
bool takes_portable_split_kv(const attention::ForwardParams& p, const Limits& limits) {
  if (p.cache.present()) return !fills_tiles_of_cache(p, limits);
  if (gains_from_packed_heads(p, limits)) return false;
  const int64_t queries = p.sequences.max_seqlen_q;
  if (!is_bound_by_keys(p) || queries > kQueriesBoundByKeys) return false;
  if (queries <= kQueriesOfFewRows || p.queries_per_key_head() > 1) return true;
  return score_mode(p, limits) == ScoreMode::kGeneric || !heads_fill_sms(p, limits);
}

// Whether a call wants row_max and split-KV. No split-KV kernel of this backend writes row_max.
bool wants_row_max_of_splits(const attention::ForwardParams& p, const Limits& limits) {
  constexpr int64_t kMostHeadDim = largest_split_head_dim();
  return p.row_max.present() && score_mode_sm90(p) == ScoreMode::kScaleOnly && largest_head_dim(p) <= kMostHeadDim &&
         splits_keys(p, kSplitTileQueries, limits);
}

// Whether the portable kernels run instead. Only lengths, head dims and features decide, so that a result does not
// depend on the rest of the batch. Split-KV is the exception.
bool is_for_portable_kernels(const attention::ForwardParams& p, const Limits& limits) {
  if (takes_bias_stationary(p) && !prefers_single_tile(p)) return true;
  if (wants_row_max_of_splits(p, limits)) return true;
  if (takes_portable_split_kv(p, limits)) return true;
  const attention::SequenceTable& lengths = p.sequences;
  const int64_t keys = is_packed(p) ? std::min(lengths.total_k, lengths.max_seqlen_k) : lengths.max_seqlen_k;
  // TMA descriptors cannot describe an empty tensor.
  if (keys == 0 || p.head_dim_qk == 0 || p.head_dim_v == 0) return true;
  // The gradient of a float32 bias is more precise than out, and sums of dS cancel only where both passes compute the
  // scores by the same GEMMs. Whether a bias gets a gradient is unknown here, and portable kernels compute that of all
  // but key biases.
  const attention::BroadcastView& bias = p.score_mod.bias;
  const bool is_float32 = bias.present() && bias.element == attention::ElementType::kFloat32;
  if (is_float32 && !key_bias_mode(p)) return true;
  return leaves_tiles_empty(p, limits);
}

int64_t longest(const attention::ForwardParams& p) {
  return std::max(p.sequences.max_seqlen_q, p.sequences.max_seqlen_k);
}

// The keys that a query may see: far more than there are where a side is not bounded.
int64_t window_of(const attention::ForwardParams& p) { return p.visibility.left + 1 + p.visibility.right; }

// Whether both sides are bounded, and hide something.
bool is_window(const attention::ForwardParams& p) { return !p.visibility.one_sided() && window_of(p) < longest(p); }

// Whether rows of q, k, v and out consist of whole sectors of 32 bytes.
bool has_whole_sectors(const attention::ForwardParams& p) {
  return p.head_dim_qk % kWholeSectors == 0 && p.head_dim_v % kWholeSectors == 0;
}

// Whether prologue and epilogue dominate, so that two CTAs per SM end earlier. They have other key tiles, and so other
// results. So only lengths, head dims and visibility decide.
bool is_bound_by_epilogues(const attention::ForwardParams& p) {
  if (p.visibility.one_sided()) return longest(p) <= kTwoCtasTokens;
  return is_window(p) && window_of(p) <= kTwoCtasTokens;
}

// Whether much of what is computed lies at the edges of the visible range.
bool has_long_edges(const attention::ForwardParams& p) {
  if (is_window(p)) return window_of(p) <= kMostKeysOfEdgeWindow;
  const int64_t least = std::min(p.sequences.max_seqlen_q, p.sequences.max_seqlen_k);
  return p.visibility.one_sided() && least >= kLeastEdgeTokensOneSided && longest(p) <= kMostEdgeTokensOneSided;
}

// Whether tiles of more queries pay, because loads of keys are slower than the GEMMs, or because of the edges of the
// visible range. As above, only lengths, head dims and visibility decide.
bool gains_from_more_queries(const attention::ForwardParams& p, sm90::HeadDims dims) {
  if (dims.v > 96 && has_long_edges(p)) return true;
  if (has_whole_sectors(p)) return false;
  const int64_t most = p.visibility.one_sided() ? kKeysBoundByLoadsOneSided : kKeysBoundByLoads;
  return std::min({p.sequences.max_seqlen_q, p.sequences.max_seqlen_k, window_of(p)}) > most;
}

// Whether tiles of fewer queries end earlier because they fill the GPU more evenly. A result does not depend on it: a
// row iterates over the same key tiles, in the same order.
bool fills_gpu_more_evenly(const attention::ForwardParams& p, const ForwardConfig& fewer, const ForwardConfig& more,
                           const Limits& limits) {
  const bool ends_on_short_tiles = is_window(p) || (more.dims.v > 96 && p.visibility.one_sided());
  const auto rows_of_cta = [&](const ForwardConfig& config) {
    const int rows = config.block_m();
    const auto waves_of_tiles = [&](int queries) {
      const int64_t tiles = p.batch * p.num_heads_q * attention::ceil_div(p.sequences.max_seqlen_q, queries);
      return static_cast<double>(tiles) / static_cast<double>(limits.sms);
    };
    // Query tiles that see few keys come last, and fill the last wave.
    if (ends_on_short_tiles) return kWarpgroupRows * waves_of_tiles(kWarpgroupRows) + 0.5 * rows;
    return rows * std::ceil(waves_of_tiles(rows));
  };
  const double of_long_rows = has_whole_sectors(p) ? kRowCost : kRowCostOfSlowLoads;
  const double of_short_rows = more.has_key_bias() ? kRowCostOfKeyBias : kRowCostUpTo64;
  return rows_of_cta(fewer) * (more.dims.v <= 64 ? of_short_rows : of_long_rows) < rows_of_cta(more);
}

// The row whose tiles have as many keys as blocks have, in place of `chosen`, so that no tile is seen in part. Tiles of
// 128 keys show blocks of 128.
int row_of_blocks(const attention::ForwardParams& p, RowKind kind, int chosen) {
  const attention::BlockMask& blocks = p.score_mod.blocks;
  const ForwardConfig& current = sm90::kForwardConfigs[chosen];
  if (!blocks.present() || current.block_n <= 1 << blocks.key_shift) return chosen;
  const int found = find_row(p, kind, [&](const ForwardConfig& row) {
    return row.dims == current.dims && row.score == current.score && row.block_n == 1 << blocks.key_shift;
  });
  return found == kNoRow ? chosen : found;
}

// p: with packed heads, if the row packs them.
int choose_row(const attention::ForwardParams& p, RowKind kind, const Limits& limits) {
  const auto default_row = [&](ScoreMode score) {
    const bool later_keys = score == ScoreMode::kAlibiMask || (score == ScoreMode::kAlibi && p.visibility.right != 0);
    return find_row(p, kind, [&](const ForwardConfig& row) {
      return row.score == score && !row.split_kv && row.later_keys == later_keys;
    });
  };
  const ScoreMode score = score_mode(p, limits);
  int chosen = default_row(score);
  if (chosen == kNoRow) chosen = default_row(ScoreMode::kGeneric);
  if (chosen == kNoRow) return kNoRow;
  const ScoreMode of_row = sm90::kForwardConfigs[chosen].score;
  if (!sm90::varies_queries(of_row)) return row_of_blocks(p, kind, chosen);
  const int split_kv = find_row(p, kind, [&](const ForwardConfig& row) { return row.split_kv && row.score == of_row; });
  const bool has_slices = num_slices(p.head_dim_v, sm90::kColumns) > 1;  // for which fewer splits would be left
  if (split_kv != kNoRow && !has_slices && splits_keys(p, sm90::kForwardConfigs[split_kv].block_m(), limits))
    return split_kv;
  // Rows of the same head dims and score mode follow each other.
  const int first = chosen;
  const auto other_row = [&](auto&& is_wanted) {
    const ForwardConfig& current = sm90::kForwardConfigs[chosen];
    for (int row = first; row < kNumRows; ++row) {
      const ForwardConfig& config = sm90::kForwardConfigs[row];
      if (config.dims != current.dims || config.score != current.score) break;
      if (config.differs_in_tiles_only(current) && is_wanted(config, current)) return row;
    }
    return kNoRow;
  };
  const int two_ctas = other_row([](const ForwardConfig& row, const ForwardConfig&) { return row.ctas_per_sm == 2; });
  if (two_ctas != kNoRow && is_bound_by_epilogues(p)) return two_ctas;
  const int more_queries = other_row(
      [](const ForwardConfig& row, const ForwardConfig& current) { return row.block_m() > current.block_m(); });
  if (more_queries != kNoRow && gains_from_more_queries(p, sm90::kForwardConfigs[chosen].dims)) chosen = more_queries;
  const int fewer_queries = other_row([](const ForwardConfig& row, const ForwardConfig& current) {
    return row.block_m() < current.block_m() && row.block_n == current.block_n;
  });
  if (fewer_queries == kNoRow) return chosen;
  // Where queries see different keys, what is subtracted from a key bias depends on the tile, so only lengths decide.
  const bool takes_fewer =
      of_row == ScoreMode::kKeyBias && !p.visibility.unlimited()
          ? longest(p) <= kKeyBiasTokensOfFewerQueries || !has_aligned_diagonal(p)
          : fills_gpu_more_evenly(p, sm90::kForwardConfigs[fewer_queries], sm90::kForwardConfigs[chosen], limits);
  return takes_fewer ? fewer_queries : chosen;
}

// Whether a plan without a mask can compute intervals of keys. Split-KV cannot, because it combines the splits of all
// batch entries.
bool takes_intervals(const ForwardPlan& plan) {
  if (plan.kernel == ForwardKernel::kSingleTile) return true;
  if (plan.kernel != ForwardKernel::kWarpSpecialised) return false;
  const ForwardConfig& config = sm90::kForwardConfigs[plan.row];
  return !config.has_bias_or_mask() && !config.split_kv;
}

// Whether batch entries of which the mask leaves one interval of keys can be computed as if they had no other keys.
// Where a query's diagonal key matters, it must be the key of the same number, whatever the interval is.
bool may_have_intervals(const attention::ForwardParams& p) {
  if (key_bias_score(p)) return !is_packed(p) && p.sequences.max_seqlen_k > kMostUnscannedKeys;
  const attention::BroadcastView& mask = p.score_mod.mask;
  const bool hides_keys = mask.head_stride == 0 && mask.query_stride == 0 && mask.key_stride != 0;
  if (!hides_keys || p.score_mod.selects_keys() || is_packed(p)) return false;
  const bool has_no_diagonal = p.visibility.unlimited() && !p.score_mod.alibi.present();
  return has_no_diagonal || p.visibility.diagonal(p.sequences.at(0)) == 0;
}

ForwardPlan plan_forward(const attention::ForwardParams& p, bool may_pack_heads, const Limits& limits);

// Such batch entries need no kernel with masks or biases, which would be slower (docs/kernels/log/sm90.md, "Padding
// without a mask").
void plan_intervals(ForwardPlan& plan, const attention::ForwardParams& p, const Limits& limits) {
  if (!may_have_intervals(p)) return;
  attention::ForwardParams without_padding = p;
  (p.score_mod.mask.present() ? without_padding.score_mod.mask : without_padding.score_mod.bias) = {};
  auto of_intervals =
      std::make_shared<const ForwardPlan>(plan_forward(without_padding, /*may_pack_heads=*/false, limits));
  if (!takes_intervals(*of_intervals)) return;
  const int64_t entries = p.score_mod.mask.present() ? count_mask_tiles(p).batch : p.batch;
  plan.workspace.intervals = append(plan.workspace.bytes, entries * int64_t{sizeof(attention::KeyInterval)});
  plan.workspace.of_intervals = append(plan.workspace.bytes, of_intervals->workspace.bytes);
  plan.of_intervals = std::move(of_intervals);
}

// The plan of a call with a mask of keys beside dropout, with the mask as a key bias: longer calls skip padding as
// intervals. There is none where no kernel of a key bias and dropout would run.
std::optional<ForwardPlan> plan_mask_as_bias(const attention::ForwardParams& p, const Limits& limits) {
  if (!p.dropout.enabled() || longest(p) > kShortTokens || !may_have_mask_as_bias(p)) return std::nullopt;
  ForwardPlan plan = plan_forward_sm90(attention::with_mask_as_bias(p, p.score_mod.mask.data), limits);
  if (plan.score != ScoreMode::kKeyBiasDropout) return std::nullopt;
  plan.workspace.mask_as_bias = append(plan.workspace.bytes, attention::key_bias_bytes(p));
  return plan;
}

// The plan of a call with an aligned copy of its bias, where a kernel runs that reads it in chunks of 16 bytes. Other
// kernels read the bias where it is.
std::optional<ForwardPlan> plan_aligned_bias(const attention::ForwardParams& p, const Limits& limits) {
  if (!may_align_bias(p, limits)) return std::nullopt;
  ForwardPlan plan = plan_forward_sm90(attention::with_aligned_bias(p, address_in_workspace()), limits);
  const bool reads_boxes = plan.kernel == ForwardKernel::kWarpSpecialised && reads_bias_boxes(plan.score);
  if (!reads_boxes && plan.kernel != ForwardKernel::kShortBias) return std::nullopt;
  plan.workspace.aligned_bias = append(plan.workspace.bytes, attention::AlignedBias::of(p).bytes());
  return plan;
}

ForwardPlan plan_forward(const attention::ForwardParams& p, bool may_pack_heads, const Limits& limits) {
  if (std::optional<ForwardPlan> with_copy = plan_aligned_bias(p, limits)) return *std::move(with_copy);
  if (takes_short_bias(p)) return plan_forward_short_bias(p);
  if (std::optional<ForwardPlan> with_bias = plan_mask_as_bias(p, limits)) return *std::move(with_bias);
  if (is_for_portable_kernels(p, limits)) return plan_forward_sm80(p, limits);
  if (takes_single_tile(p)) return plan_forward_single_tile(p, limits);
  const bool packs_heads = p.cache.present() || (may_pack_heads && gains_from_packed_heads(p, limits));
  const attention::ForwardParams of_rows = packs_heads ? attention::with_packed_heads(p) : p;
  const RowKind kind = packs_heads ? RowKind::kKvCache : p.row_max.present() ? RowKind::kRowMax : RowKind::kPlain;
  const int row = choose_row(of_rows, kind, limits);
  if (row == kNoRow) return plan_forward_sm80(p, limits);
  ForwardPlan plan;
  plan.row_max = p.row_max.present();
  plan.kernel = ForwardKernel::kWarpSpecialised;
  plan.row = row;
  const ForwardConfig& config = sm90::kForwardConfigs[plan.row];
  plan.score = config.score;
  plan.head_dim = config.dims.qk;
  plan.head_dim_v = config.dims.v;
  plan.tile = {.queries = config.block_m(),
               .keys = config.block_n,
               .warps = 4 * config.warpgroups,
               .columns = sm90::kColumns,
               .ctas_per_sm = config.ctas_per_sm,
               .stages = config.kv_stages};
  plan.nan_repair = NanRepair::kInKernel;
  plan.l2_bytes = limits.l2_bytes;
  plan.persistent_ctas = config.ctas_per_sm * limits.sms;
  plan.smaller_head_groups = smaller_head_groups(attention::ceil_div(of_rows.sequences.max_seqlen_q, config.block_m()));
  plan.uneven_heads = uneven_heads(config, plan.persistent_ctas);
  if (p.score_mod.hides_keys()) {
    plan.workspace.mask_tiles = append(plan.workspace.bytes, mask_tiles_bytes(p));
    if (p.score_mod.mask.present() && config.score != ScoreMode::kGeneric) {
      plan.workspace.mask_bits = append(plan.workspace.bytes, mask_bits_bytes(p));
    }
  }
  const int64_t whole_tiles = p.batch * of_rows.num_heads_q *
                              attention::ceil_div(of_rows.sequences.max_seqlen_q, plan.tile.queries) *
                              num_slices(p.head_dim_v, plan.tile.columns);
  if (config.split_kv) plan.kv_splits = kv_splits(of_rows, whole_tiles, limits);
  const int64_t tiles = whole_tiles * plan.kv_splits;
  if (config.split_kv) {
    const int64_t columns = common::split_columns(config.dims.v);
    plan.workspace.split_rows = append(plan.workspace.bytes, tiles * plan.tile.queries * columns * 4);
    plan.workspace.split_states = append(plan.workspace.bytes, tiles * plan.tile.queries * 8);
  }
  plan.workspace.nan_flags = append(plan.workspace.bytes, tiles * plan.tile.warps);
  plan.workspace.tile_list = append(plan.workspace.bytes, tiles * int64_t{sizeof(int)});
  if (is_packed(p)) {
    const int64_t of_column = p.sequences.total_q / plan.tile.queries + p.batch;  // at most, of all sequences
    const int64_t most = of_column * p.num_heads_q * num_slices(p.head_dim_v, plan.tile.columns) * plan.kv_splits;
    plan.existing_tiles = static_cast<uint32_t>(ExistingTiles::count_entries(tiles, most, limits.sms));
    if (plan.existing_tiles > 0) {
      plan.workspace.existing_tiles = append(plan.workspace.bytes, ExistingTiles::bytes(tiles, plan.existing_tiles));
    }
  }
  if (reads_bias_boxes(config.score) && p.score_mod.bias.is_relative()) {
    plan.workspace.bias_boxes = append(plan.workspace.bytes, relative_bias_boxes(p).bytes());
  }
  if (config.has_key_bias()) {
    plan.workspace.bias_maxima =
        append(plan.workspace.bytes, attention::KeyBiasMaxima::bytes(attention::Float32KeyBias::of(p)));
  }
  if (p.score_mod.mask.present() || config.has_key_bias()) plan_intervals(plan, p, limits);
  return plan;
}

}  // namespace

ForwardPlan plan_forward_sm90(const attention::ForwardParams& p, const Limits& limits) {
  return plan_forward(p, /*may_pack_heads=*/true, limits);
}

}  // namespace flash_attn_ext::plan
