#include <cmath>

#include "attention/key_interval.h"
#include "kernels/config/sm90.h"
#include "kernels/plan/mask_tiles.h"
#include "kernels/plan/sm80.h"
#include "kernels/plan/sm90.h"
#include "kernels/plan/split.h"
#include "kernels/plan/workspace.h"

namespace flash_attn_ext::plan {
namespace {

constexpr int kWarpgroupRows = 64;

int tile_queries(sm90::HeadDims dims, Variant variant) {
  return kWarpgroupRows * sm90::forward_tile(dims, variant).warpgroups;
}

// Whether tiles would be so empty that the portable kernels are faster.
bool leaves_tiles_empty(const attention::ForwardParams& p) {
  constexpr sm90::HeadDims kSmallest = sm90::kForwardHeadDims[0];
  if (p.head_dim_qk > kSmallest.qk || p.head_dim_v > kSmallest.v) return false;
  const int64_t queries = p.sequences.max_seqlen_q;
  const int64_t keys = visible_keys(p);
  const int64_t tokens = std::max(queries, keys);
  if (tokens <= sm90::kPortableTokens) return true;
  switch (wanted_variant_sm90(p)) {
    case Variant::kPlain:
      if (takes_single_tile(p)) return false;
      return keys <= sm90::kPortableKeys || (tokens <= sm90::kShortTokens && queries <= sm90::kPortableQueries);
    case Variant::kExtended:
      return tokens <= sm90::kShortTokens;
    default:
      return false;
  }
}

// Whether the portable kernels run instead. Only lengths, head dims and features decide, so that a result does not
// depend on the rest of the batch.
bool is_for_portable_kernels(const attention::ForwardParams& p) {
  if (p.cache.present() || (is_bound_by_keys(p) && p.sequences.max_seqlen_q <= sm90::kQueriesBoundByKeys)) return true;
  const attention::SequenceTable& lengths = p.sequences;
  const int64_t keys = is_packed(p) ? std::min(lengths.total_k, lengths.max_seqlen_k) : lengths.max_seqlen_k;
  // TMA descriptors cannot describe an empty tensor.
  if (keys == 0 || p.head_dim_qk == 0 || p.head_dim_v == 0) return true;
  // The gradient of a float32 bias is more precise than out, and sums of dS cancel only where both passes compute the
  // scores by the same GEMMs. These are those of the portable kernels, as long as the backward pass is theirs.
  const attention::BroadcastView& bias = p.score_mod.bias;
  if (bias.present() && bias.element == attention::ElementType::kFloat32) return true;
  return leaves_tiles_empty(p);
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
  return p.head_dim_qk % sm90::kWholeSectors == 0 && p.head_dim_v % sm90::kWholeSectors == 0;
}

// Whether the tiles of Short kernels, smaller than those of another variant, end earlier because they fill the GPU more
// evenly. A result does not depend on it: a row iterates over the same key tiles, in the same order.
bool is_short(const attention::ForwardParams& p, sm90::HeadDims dims, Variant other, const Limits& limits) {
  if (!sm90::has_forward_kernel(dims, Variant::kShort)) return false;
  if (sm90::forward_tile(dims, Variant::kShort).keys != sm90::forward_tile(dims, other).keys) return false;
  const bool ends_on_short_tiles = is_window(p) || (dims.v > 96 && p.visibility.one_sided());
  const auto rows_of_block = [&](Variant variant) {
    const int rows = tile_queries(dims, variant);
    const auto waves_of_tiles = [&](int queries) {
      const int64_t tiles = p.batch * p.num_heads_q * sm80::num_tiles(p.sequences.max_seqlen_q, queries);
      return static_cast<double>(tiles) / static_cast<double>(limits.sms);
    };
    // Query tiles that see few keys come last, and fill the last wave.
    if (ends_on_short_tiles) return kWarpgroupRows * waves_of_tiles(kWarpgroupRows) + 0.5 * rows;
    return rows * std::ceil(waves_of_tiles(rows));
  };
  return rows_of_block(Variant::kShort) * sm90::short_row_cost(dims, has_whole_sectors(p)) < rows_of_block(other);
}

// Whether tiles so small that two CTAs share an SM end earlier. They have other key tiles, and so other results. So
// only lengths, head dims and visibility decide.
bool is_small(const attention::ForwardParams& p, sm90::HeadDims dims) {
  if (!sm90::has_forward_kernel(dims, Variant::kSmall)) return false;
  if (p.visibility.one_sided()) return longest(p) <= sm90::kSmallTokens;
  return is_window(p) && window_of(p) <= sm90::kSmallTokens;
}

// Whether much of what is computed lies at the edges of the visible range.
bool has_tall_edges(const attention::ForwardParams& p) {
  if (is_window(p)) return window_of(p) <= sm90::kTallWindow;
  const int64_t least = std::min(p.sequences.max_seqlen_q, p.sequences.max_seqlen_k);
  return p.visibility.one_sided() && least > sm90::kTallKeys && longest(p) <= sm90::kTallTokensOneSided;
}

// Whether tiles of more queries are worthwhile, because loads of keys are slower than the GEMMs, or because of the
// edges of the visible range. As above, only lengths, head dims and visibility decide.
bool is_tall(const attention::ForwardParams& p, sm90::HeadDims dims) {
  if (!sm90::has_forward_kernel(dims, Variant::kTall)) return false;
  if (dims.v > 96 && has_tall_edges(p)) return true;
  if (has_whole_sectors(p)) return false;
  const int64_t most = p.visibility.one_sided() ? sm90::kTallKeysOneSided : sm90::kTallKeys;
  return std::min({p.sequences.max_seqlen_q, p.sequences.max_seqlen_k, window_of(p)}) > most;
}

// Whether a variant can compute intervals of keys. Variants with masks cannot, nor can split-KV, which combines the
// splits of all batch entries.
bool takes_intervals(Variant variant) {
  return variant == Variant::kDropout || (sm90::is_plain(variant) && variant != Variant::kSplitKv) ||
         variant == Variant::kSingleTile;
}

sm90::HeadDims head_dims_of(const attention::ForwardParams& p, Variant variant) {
  return sm90::forward_head_dims(p.head_dim_qk, p.head_dim_v, variant);
}

Variant choose_variant(const attention::ForwardParams& p, const Limits& limits) {
  const Variant wanted = wanted_variant_sm90(p);
  const sm90::HeadDims dims = head_dims_of(p, wanted);
  if (dims == sm90::HeadDims{}) return Variant::kExtended;
  if (wanted != Variant::kPlain) return wanted;
  const sm90::HeadDims of_parts = head_dims_of(p, Variant::kSplitKv);
  const bool divides =
      of_parts != sm90::HeadDims{} && leaves_sms_idle(p, tile_queries(of_parts, Variant::kSplitKv), limits);
  if (divides) return Variant::kSplitKv;
  if (is_small(p, dims)) return Variant::kSmall;
  const Variant variant = is_tall(p, dims) ? Variant::kTall : Variant::kPlain;
  return is_short(p, dims, variant, limits) ? Variant::kShort : variant;
}

// Whether batch entries of which the mask leaves one interval of keys can be computed as if they had no other keys.
// Where a query's diagonal key matters, it must be the key of the same number, whatever the interval is.
bool may_have_intervals(const attention::ForwardParams& p) {
  const attention::BroadcastView& mask = p.score_mod.mask;
  const bool hides_keys = mask.head_stride == 0 && mask.query_stride == 0 && mask.key_stride != 0;
  if (!hides_keys || is_packed(p)) return false;
  return p.visibility.unlimited() || p.visibility.diagonal(p.sequences.at(0)) == 0;
}

// Such batch entries need no kernel with masks, which would be slower (docs/kernels/log/sm90.md, "Padding without a
// mask").
void plan_intervals(ForwardPlan& plan, const attention::ForwardParams& p, const Limits& limits) {
  if (!may_have_intervals(p)) return;
  attention::ForwardParams without_mask = p;
  without_mask.score_mod.mask = {};
  auto of_intervals = std::make_shared<const ForwardPlan>(plan_forward_sm90(without_mask, limits));
  if (of_intervals->kernel != ForwardKernel::kWarpSpecialised || !takes_intervals(of_intervals->variant)) return;
  plan.workspace.intervals =
      append(plan.workspace.bytes, count_mask_tiles(p).batch * int64_t{sizeof(attention::KeyInterval)});
  plan.workspace.of_intervals = append(plan.workspace.bytes, of_intervals->workspace.bytes);
  plan.of_intervals = std::move(of_intervals);
}

}  // namespace

ForwardPlan plan_forward_sm90(const attention::ForwardParams& p, const Limits& limits) {
  if (is_for_portable_kernels(p)) return plan_forward_sm80(p, limits);
  if (takes_single_tile(p)) return plan_forward_single_tile(p, limits);
  ForwardPlan plan;
  plan.kernel = ForwardKernel::kWarpSpecialised;
  plan.variant = choose_variant(p, limits);
  const sm90::HeadDims dims = head_dims_of(p, plan.variant);
  plan.head_dim = dims.qk;
  plan.head_dim_v = dims.v;
  const sm90::ForwardTile tile = sm90::forward_tile(dims, plan.variant);
  plan.tile = {.queries = tile_queries(dims, plan.variant),
               .keys = tile.keys,
               .warps = 4 * tile.warpgroups,
               .columns = sm90::kColumns,
               .blocks = tile.blocks,
               .stages = tile.key_stages};
  plan.nan_repair = NanRepair::kInKernel;
  plan.l2_bytes = limits.l2_bytes;
  plan.persistent_ctas = tile.blocks * limits.sms;
  if (p.score_mod.mask.present()) {
    plan.workspace.mask_tiles = append(plan.workspace.bytes, count_mask_tiles(p).total());
    if (plan.variant != Variant::kExtended) {
      plan.workspace.mask_bits = append(plan.workspace.bytes, mask_bits_bytes(p));
    }
  }
  const int64_t whole_tiles = p.batch * p.num_heads_q * sm80::num_tiles(p.sequences.max_seqlen_q, plan.tile.queries) *
                              sm80::num_slices(p.head_dim_v, plan.tile.columns);
  if (plan.variant == Variant::kSplitKv) plan.kv_splits = kv_splits(p, whole_tiles, limits);
  const int64_t tiles = whole_tiles * plan.kv_splits;
  if (plan.variant == Variant::kSplitKv) {
    const int64_t columns = sm90::split_columns(dims.v);
    plan.workspace.split_rows = append(plan.workspace.bytes, tiles * plan.tile.queries * columns * 4);
    plan.workspace.split_states = append(plan.workspace.bytes, tiles * plan.tile.queries * 8);
  }
  plan.workspace.nan_flags = append(plan.workspace.bytes, tiles * plan.tile.warps);
  plan.workspace.tile_list = append(plan.workspace.bytes, tiles * int64_t{sizeof(int)});
  if (p.score_mod.mask.present()) plan_intervals(plan, p, limits);
  return plan;
}

}  // namespace flash_attn_ext::plan
