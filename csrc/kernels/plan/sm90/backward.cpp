// Plans Hopper's backward pass: which of its kernels runs, and what the key-stationary one needs.
#include <algorithm>
#include <iterator>

#include "attention/division.h"
#include "attention/key_bias.h"
#include "kernels/config/key_stationary.h"
#include "kernels/config/two_pass.h"
#include "kernels/plan/plan.h"
#include "kernels/plan/sm80/sm80.h"
#include "kernels/plan/sm80/split.h"
#include "kernels/plan/sm90/sm90.h"
#include "kernels/schedule/existing_tiles.h"
#include "kernels/schedule/key_tile_parts.h"
#include "kernels/schedule/mask_iterations.h"
#include "kernels/schedule/relative_bias_boxes.h"

namespace flash_attn_ext::plan {
namespace {

using attention::BackwardParams;

// The thresholds of this file were measured: docs/kernels/log/sm90_backward.md, "Figures behind constants".

// Up to these numbers of queries, or of queries and keys, the portable kernels are faster where scores are only scaled.
struct PortableBackward {
  int64_t queries;
  int64_t tokens;
};
// waves: tiles of keys per SM, rounded up.
PortableBackward portable_backward(int64_t waves) {
  if (waves > 2) return {.queries = 64, .tokens = 96};
  return {.queries = kPortableQueries, .tokens = waves > 1 ? 224 : 176};
}

// Augmented columns pay from this many tiles of 64 queries, or of 128 keys, on where scores are only scaled, at head
// dims other than 96. They take four times the bytes of the statistics, which short calls would wait for.
constexpr int64_t kAddingQueryTiles = 9;
constexpr int64_t kAddingKeyTiles = 5;  // at head dim 64

// The range of softcaps c of the key-stationary kernel. For it P of a masked score is exp2 of -2^63 c log2(e)
// (KeyScores::bound), which vanishes for any c that is not tiny; 2^-10 is far from that limit. Above the range, the
// rounding of a capped score would be as large as that of weights in float16.
constexpr double kLeastSoftcap = 0x1p-10;
constexpr double kMostSoftcap = 0x1p8;

// The score mode of the key-stationary kernel for a call.
ScoreMode key_stationary_score(const BackwardParams& p) {
  if (sums_dscores(p)) return ScoreMode::kKeyBias;
  if (const std::optional<ScoreMode> of_keys = key_bias_score(p)) return *of_keys;
  const double softcap = p.score_mod.softcap;
  const bool softcap_is_in_range = softcap == 0.0 || (softcap >= kLeastSoftcap && softcap <= kMostSoftcap);
  const std::optional<ScoreMode> of_softcap_or_alibi = softcap_or_alibi_score(p);
  return softcap_is_in_range && of_softcap_or_alibi ? *of_softcap_or_alibi : score_mode_sm90(p);
}

// Which rows of the table are for a call's head dims and scores.
struct WantedRows {
  sm90::HeadDims dims;
  ScoreMode score;
  bool masks_bias;

  explicit WantedRows(const BackwardParams& p)
      : dims(sm90::key_stationary_head_dims(p.head_dim_qk, p.head_dim_v)),
        score(key_stationary_score(p)),
        masks_bias(reads_bias_boxes(score) && p.score_mod.hides_keys()) {}

  bool have(const sm90::KeyStationaryConfig& row) const {
    return row.dims == dims && row.score == score && row.hides_keys == masks_bias;
  }
};

bool has_rows(const BackwardParams& p) {
  const WantedRows wanted(p);
  return std::any_of(std::begin(sm90::kKeyStationaryConfigs), std::end(sm90::kKeyStationaryConfigs),
                     [&](const sm90::KeyStationaryConfig& row) { return wanted.have(row); });
}

// The row of the table for a call. query_tiles: of the longest sequence.
int choose_row(const BackwardParams& p, const LoopOrder& order, int64_t query_tiles, bool chunks_queries) {
  const WantedRows wanted(p);
  const sm90::HeadDims dims = wanted.dims;
  const bool sums = sums_dscores(p);
  // Among the rows that suit a call, only those for scores that are only scaled differ in these two.
  const bool pre_signals_dq = dims.qk > (order.cyclic ? 96 : 64);
  const bool adds_statistics =
      dims.qk == 96 || query_tiles >= kAddingQueryTiles || (dims.qk <= 64 && order.tiles >= kAddingKeyTiles);
  int found = 0;
  for (int row = 0; row < static_cast<int>(std::size(sm90::kKeyStationaryConfigs)); ++row) {
    const sm90::KeyStationaryConfig& config = sm90::kKeyStationaryConfigs[row];
    if (!wanted.have(config) || config.sums_dscores != sums) continue;
    if (config.chunks_queries != chunks_queries) continue;
    found = row;
    if (config.pre_signals_dq == pre_signals_dq && config.adds_statistics == adds_statistics) break;
  }
  return found;
}

// Whether the key-stationary kernel computes all gradients. Calls with few queries take other kernels, unless scores
// are only scaled or dropped.
bool takes_key_stationary(const BackwardParams& p) {
  if (!has_rows(p) || weights_may_vanish(p)) return false;
  switch (key_stationary_score(p)) {
    case ScoreMode::kScaleOnly:
    case ScoreMode::kDropout:
      return true;
    case ScoreMode::kAlibi:
    case ScoreMode::kAlibiMask:
    case ScoreMode::kSoftcap:
    case ScoreMode::kSoftcapMask:
    case ScoreMode::kMask:
    case ScoreMode::kMaskDropout:
      return !has_few_queries(p);
    case ScoreMode::kKeyBias:
    case ScoreMode::kKeyBiasDropout:
      return !has_few_queries(p) && (!p.dbias.present() || sums_dscores(p));
    case ScoreMode::kBiasMask:
    case ScoreMode::kBiasMaskDropout:
      return !has_few_queries(p) && (!p.dbias.present() || takes_dbias_over_batch(p));
    default:
      return false;
  }
}

// Whether there is memory for the lists of iterations that a mask leaves. These grow with queries times keys, even
// where the mask does not: if it is broadcast along queries, or over packed sequences, which have lists of their own.
// The same holds for intervals and blocks.
bool may_list_iterations(const BackwardParams& p, const LoopOrder& order, const Limits& limits) {
  const attention::BroadcastView& mask = p.score_mod.mask;
  if (!p.score_mod.hides_keys()) return true;
  if (!MaskIterations::may_be_numbered(p, order)) return false;
  const bool is_a_share_of_the_mask =
      mask.present() && mask.query_stride != 0 && (!is_packed(p) || mask.batch_stride != 0);
  return is_a_share_of_the_mask || MaskIterations::bytes(p, order) <= limits.max_materialised_bytes;
}

// Whether a call with a bias and a mask would have shares of query tiles without the mask. Lists of iterations cannot
// be divided into shares, and with so few keys the two-pass kernels are then faster (docs/kernels/log/sm90_backward.md,
// "A bias beside a mask").
bool lacks_shares(const BackwardParams& p, int64_t query_tiles, const Limits& limits) {
  if (!reads_bias_boxes(key_stationary_score(p)) || !p.score_mod.hides_keys()) return false;
  BackwardParams alone = p;
  alone.score_mod.mask = {};
  alone.score_mod.intervals = {};
  alone.score_mod.blocks = {};
  return loop_order(alone, limits.sms, query_tiles).shares_query_tiles();
}

// The loop order of a call that the key-stationary kernel computes. There is none where it does not take the call,
// where shares would be lacking, or where lists of iterations or boxes of a bias are more memory than they may take.
std::optional<LoopOrder> key_stationary_order(const BackwardParams& p, const Limits& limits) {
  if (!takes_key_stationary(p) || !may_write_bias_boxes(p, limits)) return std::nullopt;
  const int64_t query_tiles = LoopOrder::num_tiles(p.sequences.max_seqlen_q, LoopOrder::kQueries);
  if (lacks_shares(p, query_tiles, limits)) return std::nullopt;
  const LoopOrder order = loop_order(p, limits.sms, query_tiles);
  return may_list_iterations(p, order, limits) ? std::optional(order) : std::nullopt;
}

// TMA descriptors cannot describe an empty tensor.
bool is_empty(const BackwardParams& p) {
  const attention::SequenceTable& lengths = p.sequences;
  return std::min({lengths.max_seqlen_q, lengths.max_seqlen_k, lengths.total_q, lengths.total_k}) == 0;
}

// Whether a call is so short that the portable kernels are faster. Where scores are only scaled, these are one fused
// kernel for all gradients. It is faster with more queries, too, where CTAs here would have two key tiles, one after
// the other.
bool is_short(const BackwardParams& p, const Limits& limits) {
  const int64_t queries = p.sequences.max_seqlen_q;
  const int64_t tokens = std::max(queries, visible_keys(p));
  if (largest_head_dim(p) > 64 || tokens > kShortTokens) return false;
  const int64_t tiles = p.batch * p.num_heads_k * LoopOrder::num_tiles(p.sequences.max_seqlen_k, LoopOrder::kKeys);
  const int64_t waves = attention::ceil_div(tiles, limits.sms);
  const PortableBackward portable = portable_backward(waves);
  if (sums_dscores(p)) return false;
  if (key_bias_score(p) || softcap_or_alibi_score(p)) return !takes_key_stationary(p);
  switch (score_mode_sm90(p)) {
    case ScoreMode::kScaleOnly:
      return queries <= portable.queries || tokens <= portable.tokens;
    case ScoreMode::kMask:
    case ScoreMode::kDropout:
    case ScoreMode::kMaskDropout:
      return false;
    case ScoreMode::kBiasMask:
    case ScoreMode::kBiasMaskDropout:
      return (p.dbias.present() || !key_stationary_order(p, limits)) && queries <= kPortableQueries;
    default:
      return true;
  }
}

// Whether a call with few queries takes the portable kernels, which may split the keys of dQ among CTAs. The
// key-stationary kernel splits keys for as few queries as the portable kernels do, and runs only then.
// The two-pass kernels never split keys, and are slower for short calls of these head dims.
bool few_queries_take_portable_kernels(const BackwardParams& p) {
  const int64_t queries = p.sequences.max_seqlen_q;
  if (takes_key_stationary(p)) return queries > kSplitQueries || visible_keys(p) <= kShortTokens;
  const int64_t head_dim = largest_head_dim(p);
  return queries <= kShortTokens && (head_dim <= 64 || head_dim > sm90::kLargestKeyStationaryHeadDim);
}

// Whether the portable kernels run instead. Of a call's sizes, only lengths and head dims decide, unless the call is
// short.
bool is_for_portable_kernels(const BackwardParams& p, const Limits& limits) {
  if (is_empty(p) || takes_bias_stationary(p)) return true;
  if (!sm90::kLargestTwoPassHeadDims.fit(p.head_dim_qk, p.head_dim_v)) return true;
  if (p.head_dim_qk == 0 || p.head_dim_v == 0) return true;
  if (has_precise_dbias(p) && !sums_dscores(p)) return true;
  if (p.dq.data == nullptr || (p.dk.data == nullptr && p.dv.data == nullptr)) return true;
  if (p.dout.row_stride == 0) return true;  // TMA cannot read it
  // Out, dout and results are read and written 16 bytes at a time. Results lie in memory in the order of q's, k's and
  // v's strides.
  if (!has_whole_chunks(p)) return true;
  if (takes_query_stationary(p)) return false;
  return has_few_queries(p) ? few_queries_take_portable_kernels(p) : is_short(p, limits);
}

// Launches of fewer query tiles would spend their time on partial dK and dV. No L2 of a Hopper GPU is that small.
constexpr int64_t kLeastTilesOfChunk = 64;

// Whether a call may be divided into query chunks. Where a window hides the keys before it, L2 holds the queries that
// see the key tiles in flight. In split-KV there are few queries. Shares of query tiles run at the same time
// instead. Only scale-only kernels have query chunks.
bool may_chunk_queries(const BackwardParams& p, const LoopOrder& order) {
  return score_mode_sm90(p) == ScoreMode::kScaleOnly && !order.split_kv && !order.shares_query_tiles() &&
         p.visibility.left == attention::Visibility::kUnbounded;
}

// Divides the queries of a head into chunks whose float32 sums of dQ take a third of L2 at most, because Q and dO of
// the chunk, which take as many bytes, share L2 with them (docs/kernels/log/sm90_backward.md, "Query chunks").
// Sequences of a packed batch count with their average length, because each launch goes through the key tiles of all of
// them.
QueryChunks choose_query_chunks(const BackwardParams& p, const LoopOrder& order, const Limits& limits) {
  if (!may_chunk_queries(p, order)) return {};
  const sm90::HeadDims dims = sm90::key_stationary_head_dims(p.head_dim_qk, p.head_dim_v);
  const int64_t bytes_of_tile = LoopOrder::kQueries * dims.qk * int64_t{sizeof(float)};
  const int64_t most = limits.l2_bytes / 3 / bytes_of_tile;
  if (most < kLeastTilesOfChunk) return {};
  const int64_t longest = LoopOrder::num_tiles(p.sequences.max_seqlen_q, LoopOrder::kQueries);
  const int64_t average = is_packed(p) ? p.sequences.total_q / p.batch / LoopOrder::kQueries : longest;
  if (average <= most) return {};
  const int64_t tiles = attention::even_share(longest, most);
  return {.tiles = static_cast<int>(tiles), .count = static_cast<int>(attention::ceil_div(longest, tiles))};
}

// For how many parts of key tiles a call with a mask has room: two for each CTA. In cyclic order every key tile sees
// every query, and where key tiles have few iterations no part would be worth its partial sums.
int count_part_sums(const BackwardParams& p, const LoopOrder& order, int64_t query_tiles, const Limits& limits) {
  constexpr int64_t kPartsOfCta = 2;
  constexpr int64_t kLeastIterations = 4 * KeyTileParts::kLeastIterations;
  const int64_t iterations = query_tiles * p.queries_per_key_head() / order.kv_group_shares;
  if (!p.score_mod.hides_keys() || order.cyclic || order.split_kv || iterations < kLeastIterations) return 0;
  const sm90::HeadDims dims = sm90::key_stationary_head_dims(p.head_dim_qk, p.head_dim_v);
  return static_cast<int>(std::min(
      {kPartsOfCta * limits.sms, limits.max_materialised_bytes / partial_sums_bytes(dims), int64_t{INT16_MAX}}));
}

int64_t key_tile_table_bytes(const BackwardPlan& plan, const BackwardParams& p) {
  const int64_t work_tiles = plan.order.num_work_tiles();
  if (plan.query_chunks.present()) return work_tiles * QueryChunks::kWorkBytes;
  if (plan.existing_tiles > 0) return plan.existing_tiles * LoopOrder::kWorkBytes;
  if (!p.score_mod.hides_keys()) return work_tiles * LoopOrder::kWorkBytes;
  const int64_t division = plan.part_sums > 0 ? KeyTileParts::division_bytes(work_tiles) : 0;
  return KeyTileParts::table_entries(work_tiles, plan.part_sums) * KeyTileParts::kWorkBytes + division;
}

// The pairs of a launch with query chunks: as many as have room for partial dK and dV, in about equal launches. Shares
// of a KV group belong to one launch, and so do two pairs of different directions. 0: there is no room.
uint32_t count_pairs_per_launch(const BackwardParams& p, const LoopOrder& order, const Limits& limits) {
  const sm90::HeadDims dims = sm90::key_stationary_head_dims(p.head_dim_qk, p.head_dim_v);
  const int64_t shares = order.kv_group_shares;
  const int64_t most = limits.max_materialised_bytes / (shares * partial_sums_bytes(order, dims));
  if (most == 0) return 0;
  const int64_t groups = order.pairs / shares;
  const int64_t equal = attention::even_share(groups, most);
  const bool in_twos = !order.cyclic && shares % 2 != 0 && equal > 1 && equal < groups;
  return static_cast<uint32_t>((in_twos ? equal / 2 * 2 : equal) * shares);
}

// Whether key tiles at the end of a batch entry are left out where the bias of all of their keys is -inf, as that of
// padding is. Counting takes a launch of its own, so not where there are few tiles, or few iterations of shares.
bool counts_keys_before_padding(const BackwardParams& p, const LoopOrder& order, int64_t query_tiles, int64_t ctas) {
  constexpr uint32_t kLeastTiles = 4;
  constexpr int64_t kLeastIterationsOfCta = 32;
  if (!key_bias_score(p) || is_packed(p) || p.score_mod.bias.head_stride != 0 || order.split_kv) return false;
  if (p.dbias.present()) return false;
  if (!order.shares_query_tiles()) return order.tiles >= kLeastTiles;
  const int64_t iterations = p.batch * p.num_heads_q * order.tiles * query_tiles;
  return order.tiles > 1 && iterations >= kLeastIterationsOfCta * ctas;
}

// Makes room for what kernels that sum dS read and write.
void plan_sums_of_dscores(BackwardPlan& plan, const BackwardParams& p) {
  BackwardPlan::Workspace& parts = plan.workspace;
  if (!attention::is_float32_key_bias(p.score_mod.bias)) {
    parts.float32_bias = append(parts.bytes, attention::Float32KeyBias::of(p).bytes());
  }
  parts.bias_maxima = append(parts.bytes, attention::KeyBiasMaxima::bytes(attention::Float32KeyBias::of(p)));
  const int64_t keys = int64_t{plan.order.pairs} * plan.order.tiles * LoopOrder::kKeys;
  parts.dscore_sums = append(parts.bytes, keys * int64_t{sizeof(float)});
  if (!p.dbias.present()) return;
  plan.dbias = BiasGradientSource::kKeySums;
  plan.writes_dbias_once = true;
  // What the rounded O leaves in a 16-bit gradient is no more than its own rounding.
  if (has_precise_dbias(p)) plan_exact_delta_of_key_bias(plan, p);
}

BackwardPlan plan_key_stationary(const BackwardParams& p, const LoopOrder& order, const Limits& limits) {
  BackwardPlan plan;
  const sm90::HeadDims dims = sm90::key_stationary_head_dims(p.head_dim_qk, p.head_dim_v);
  plan.kernels = BackwardKernels::kKeyStationary;
  plan.delta = DeltaSource::kSharedKernel;
  plan.dq_head_dim = plan.dkdv_head_dim = dims.qk;
  plan.dq_score = plan.dkdv_score = key_stationary_score(p);
  plan.nan_repair = NanRepair::kOwnLaunch;
  plan.l2_bytes = limits.l2_bytes;
  plan.persistent_ctas = limits.sms;
  plan.order = order;
  if (const QueryChunks chunks = choose_query_chunks(p, order, limits); chunks.present()) {
    const LoopOrder of_chunks = loop_order(p, limits.sms, chunks.tiles);
    // A chunk alone may have shares, which kernels for chunks do not know.
    if (may_chunk_queries(p, of_chunks)) plan.pairs_per_launch = count_pairs_per_launch(p, of_chunks, limits);
    if (plan.pairs_per_launch > 0) {
      plan.order = of_chunks;
      plan.query_chunks = chunks;
    }
  }
  const bool chunks_queries = plan.query_chunks.present();
  const int64_t longest = LoopOrder::num_tiles(p.sequences.max_seqlen_q, LoopOrder::kQueries);
  plan.row = choose_row(p, order, longest, chunks_queries);
  plan.part_sums = count_part_sums(p, plan.order, longest, limits);
  // A packed sequence begins at a tile of its own.
  plan.query_tiles_of_head = is_packed(p) ? p.sequences.total_q / LoopOrder::kQueries + p.batch : p.batch * longest;
  const int64_t query_tiles = p.num_heads_q * plan.query_tiles_of_head;
  const int64_t rows = query_tiles * LoopOrder::kQueries;
  constexpr int64_t kFloat = sizeof(float);
  BackwardPlan::Workspace& parts = plan.workspace;
  parts.delta = append(parts.bytes, statistic_bytes(p));
  if (counts_keys_before_padding(p, plan.order, longest, limits.sms)) {
    parts.keys_before_padding = append(parts.bytes, p.batch * int64_t{sizeof(int32_t)});
  }
  if (p.score_mod.hides_keys()) parts.mask_bits = append(parts.bytes, MaskIterations::bytes(p, plan.order));
  parts.dq_sums = append(parts.bytes, (rows * dims.qk * kFloat) << plan.order.log2_accumulators);
  parts.statistics = append(parts.bytes, rows * kKeyStationaryStatistics * kFloat);
  if (p.score_mod.alibi.present() && p.visibility.right != 0) {
    parts.later_statistics = append(parts.bytes, rows * kKeyStationaryStatistics * kFloat);
  }
  parts.dq_semaphores = append(parts.bytes, (query_tiles * int64_t{sizeof(int)}) << plan.order.log2_accumulators);
  if (is_packed(p) && !p.score_mod.hides_keys() && !chunks_queries) {
    const int64_t of_pair = p.sequences.total_k / LoopOrder::kKeys + p.batch;  // at most, of all sequences
    const int64_t most = of_pair * p.num_heads_k * plan.order.kv_group_shares;
    const int64_t all = plan.order.num_work_tiles();
    plan.existing_tiles = static_cast<uint32_t>(ExistingTiles::count_entries(all, most, limits.sms));
    if (plan.existing_tiles > 0) {
      parts.existing_tiles = append(parts.bytes, ExistingTiles::bytes(all, plan.existing_tiles));
    }
  }
  parts.key_tiles = append(parts.bytes, key_tile_table_bytes(plan, p));
  parts.work_counter = append(parts.bytes, int64_t{sizeof(uint32_t)});
  parts.dq_nan_flags = append(parts.bytes, p.batch * p.num_heads_q * longest * 4);
  const int64_t key_tiles = p.batch * p.num_heads_k * plan.order.tiles;
  parts.dkdv_nan_flags = append(parts.bytes, key_tiles * 4 * LoopOrder::kKeyWarpgroups);
  if (plan.order.kv_group_shares > 1 || plan.part_sums > 0) {
    // A packed sequence begins at a tile of its own here, too.
    const int64_t of_shares =
        is_packed(p) ? p.num_heads_k * (p.sequences.total_k / LoopOrder::kKeys + p.batch) : key_tiles;
    const int64_t sums = plan.order.kv_group_shares > 1 ? of_shares : 0;
    const int64_t counters = sums + plan.part_sums;
    parts.arrivals = append(parts.bytes, counters * LoopOrder::kKeyWarpgroups * int64_t{sizeof(int)});
    const int64_t partials = sums * plan.order.kv_group_shares + plan.part_sums;
    if (!chunks_queries) parts.key_sums = append(parts.bytes, partials * partial_sums_bytes(dims));
  }
  if (chunks_queries) {
    parts.key_sums = append(parts.bytes, plan.pairs_per_launch * partial_sums_bytes(plan.order, dims));
  }
  return plan;
}

// There is none where no kernel of Hopper's computes the gradients.
std::optional<BackwardPlan> plan_matrix_gradients(const BackwardParams& p, const Limits& limits) {
  if (takes_query_stationary(p)) return plan_backward_query_stationary(p, limits);
  if (const std::optional<LoopOrder> order = key_stationary_order(p, limits)) {
    BackwardPlan plan = plan_key_stationary(p, *order, limits);
    if (sums_dscores(p)) {
      plan_sums_of_dscores(plan, p);
    } else if (p.dbias.present()) {
      plan_dbias_over_batch(plan, p, limits);
    }
    return plan;
  }
  return plan_backward_two_pass(p, limits);
}

}  // namespace

BackwardPlan plan_backward_sm90(const BackwardParams& p, const Limits& limits) {
  if (std::optional<BackwardPlan> with_copy = plan_backward_aligned_bias(p, limits)) return *std::move(with_copy);
  if (takes_short_bias(p)) return plan_backward_short_bias(p, limits);
  if (std::optional<BackwardPlan> with_bias = plan_backward_mask_as_bias(p, limits)) return *std::move(with_bias);
  if (std::optional<BackwardPlan> with_more = plan_backward_unwanted(p, limits)) return *std::move(with_more);
  if (is_for_portable_kernels(p, limits)) return plan_backward_sm80(p, limits);
  // A gradient that sums whole rows of dS needs no dS. That of ALiBi slopes, of a relative-position bias, and of a bias
  // that may not read rounded dS, computes it again, by kernels of its own, most of which are portable. So no kernel of
  // the matrix gradients computes them.
  const bool sums_rows = dbias_is_row_sums(p);
  const bool is_relative = p.score_mod.bias.is_relative();
  const bool recomputes_dbias =
      p.dbias.present() && !sums_rows && !is_relative && !sums_dscores(p) && !dbias_may_read_materialised(p);
  BackwardParams of_matrices = p;
  of_matrices.dalibi_slopes = nullptr;
  if (sums_rows || is_relative || recomputes_dbias) of_matrices.dbias = {};
  std::optional<BackwardPlan> plan = plan_matrix_gradients(of_matrices, limits);
  if (!plan) return plan_backward_sm80(p, limits);
  if (is_relative && reads_bias_boxes(plan->dkdv_score)) {
    plan->workspace.bias_boxes = append(plan->workspace.bytes, relative_bias_boxes(p).bytes());
  }
  if (is_relative && p.dbias.present()) {
    takes_relative_dbias_over_batch(p) ? plan_relative_dbias_over_batch(*plan, p, limits)
                                       : plan_relative_dbias(*plan, p, limits);
  }
  if (sums_rows) {
    plan->dbias = BiasGradientSource::kRowSums;
    plan->writes_dbias_once = true;
  }
  if (recomputes_dbias) {
    plan_recomputed_dbias(*plan, p);
    plan->exact_delta_of_sums = dbias_is_column_sums(p);
  }
  if (p.dalibi_slopes != nullptr) plan_slope_gradient(*plan, p);
  return *std::move(plan);
}

}  // namespace flash_attn_ext::plan
