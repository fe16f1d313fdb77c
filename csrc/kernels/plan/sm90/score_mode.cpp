// Plans which score mode a call has on Hopper.
#include <algorithm>
#include <optional>

#include "attention/aligned_bias.h"
#include "attention/key_bias.h"
#include "kernels/config/key_stationary.h"
#include "kernels/plan/sm80/sm80.h"
#include "kernels/plan/sm90/sm90.h"
#include "kernels/schedule/relative_bias_boxes.h"

namespace flash_attn_ext::plan {
namespace {

// Whether a mask has about as many elements as its packed bits. One that is broadcast over keys has far fewer.
bool is_worth_packing(const attention::BroadcastView& mask) { return mask.key_stride != 0; }

// Whether kernels may divide a bias or ALiBi by the scale.
bool may_divide_by(double scale) { return scale >= attention::kLeastKeyBiasScale; }

// Whether scores are scaled by a positive number, not too small, and changed by a bias that is broadcast along queries
// only.
bool has_only_key_bias(const attention::AttentionParams& p) {
  attention::ScoreMod others = p.score_mod;
  others.bias = {};
  return p.score_mod.bias.is_of_keys() && others.plain() && may_divide_by(others.scale);
}

// Whether nothing but a scale of any sign changes scores, and no weight is dropped.
bool only_scales_scores(const attention::ScoreMod& mod, const attention::Dropout& dropout) {
  return mod.plain() && !dropout.enabled();
}

// Whether scores are scaled by any number and changed by a softcap only.
bool has_only_softcap(const attention::AttentionParams& p) {
  attention::ScoreMod others = p.score_mod;
  others.softcap = 0.0;
  return p.score_mod.softcap != 0.0 && only_scales_scores(others, p.dropout);
}

}  // namespace

bool has_bias_boxes(const attention::BroadcastView& bias) {
  if (bias.is_relative()) return true;  // the boxes are written first
  return bias.key_stride == 1 && bias.query_stride != 0 &&
         (bias.query_stride | bias.head_stride | bias.batch_stride) % attention::AlignedBias::kChunk == 0 &&
         reinterpret_cast<uintptr_t>(bias.data) % 16 == 0;
}

bool weights_may_vanish(const attention::AttentionParams& p) {
  return p.sink != nullptr && p.element == attention::ElementType::kBFloat16 && largest_head_dim(p) > 64;
}

bool has_only_alibi(const attention::AttentionParams& p) {
  attention::ScoreMod others = p.score_mod;
  others.alibi = {};
  return p.score_mod.alibi.present() && only_scales_scores(others, p.dropout) && may_divide_by(others.scale);
}

bool has_aligned_diagonal(const attention::AttentionParams& p) {
  return (p.visibility.keys_of(int64_t{0}, p.sequences.at(0)).end - 1) % attention::KeyBiasMaxima::kKeys == 0;
}

std::optional<ScoreMode> key_bias_score_by_position(const attention::AttentionParams& p) {
  const attention::BroadcastView& bias = p.score_mod.bias;
  if (!has_only_key_bias(p) || bias.key_stride != 1 || bias.element != p.element) return std::nullopt;
  return p.dropout.enabled() ? ScoreMode::kKeyBiasDropout : ScoreMode::kKeyBias;
}

std::optional<ScoreMode> key_bias_score(const attention::AttentionParams& p) {
  return p.visibility.unlimited() ? key_bias_score_by_position(p) : std::nullopt;
}

bool may_sum_dscores(const attention::AttentionParams& p) {
  if (!attention::is_16_bit(p.element) || !has_only_key_bias(p) || p.dropout.enabled() || is_packed(p)) return false;
  if (largest_head_dim(p) > sm90::kLargestKeyStationaryHeadDim || has_few_queries(p)) return false;
  if (p.head_dim_qk % 8 != 0 || p.head_dim_v % 8 != 0 || weights_may_vanish(p)) return false;
  if (std::max(p.sequences.max_seqlen_q, visible_keys(p)) <= kPortableTokens) return false;
  // Both passes subtract large numbers from a float32 bias (KeyBiasMaxima), and the forward pass copies none.
  const attention::BroadcastView& bias = p.score_mod.bias;
  if (bias.element == attention::ElementType::kFloat32 && bias.key_stride != 1) return false;
  // The last query of a tile must see all keys that others see (KeyBiasMaxima).
  if (p.visibility.left != attention::Visibility::kUnbounded) return false;
  // A work tile has one sum for each key. Where every query sees every key, it has all heads of the KV group.
  return p.queries_per_key_head() == 1 || bias.head_stride == 0 || !p.visibility.unlimited();
}

bool sums_dscores(const attention::BackwardParams& p) {
  // The gradient of a bias that is expanded over heads is one of heads, although its stride is 0.
  const bool has_sums = p.queries_per_key_head() == 1 || !p.dbias.per_head || !p.visibility.unlimited();
  // Other kernels would not subtract what the forward pass has subtracted from a float32 bias.
  const bool is_wanted = p.dbias.present() ? dbias_is_column_sums(p) : attention::is_float32_key_bias(p.score_mod.bias);
  return is_wanted && may_sum_dscores(p) && has_sums;
}

bool has_only_key_mask(const attention::AttentionParams& p) {
  attention::ScoreMod others = p.score_mod;
  others.mask = {};
  return p.score_mod.mask.is_of_keys() && only_scales_scores(others, p.dropout) && others.scale > 0.0;
}

bool may_have_mask_as_bias(const attention::AttentionParams& p) {
  if (!p.score_mod.mask.is_of_keys() || p.score_mod.bias.present() || is_packed(p)) return false;
  return key_bias_score(attention::with_mask_as_bias(p, p.score_mod.mask.data)).has_value();
}

bool may_align_bias(const attention::AttentionParams& p, const Limits& limits) {
  const attention::BroadcastView& bias = p.score_mod.bias;
  if (!bias.present() || bias.query_stride <= 0 || bias.key_stride == 0 || has_bias_boxes(bias)) return false;
  if (!attention::is_16_bit(p.element) || bias.element != p.element) return false;
  const attention::AlignedBias copy = attention::AlignedBias::of(p);
  return copy.chunks() <= INT32_MAX && copy.bytes() <= limits.max_materialised_bytes;
}

void* address_in_workspace() {
  alignas(16) static char address[16] = {};
  return address;
}

bool has_bits_of_mask(const attention::AttentionParams& p) {
  const attention::ScoreMod& mod = p.score_mod;
  // The bits of both would take as much memory as a mask for each pair, whatever the mask's own size.
  return mod.mask.present() ? is_worth_packing(mod.mask) && !mod.selects_keys() : mod.selects_keys();
}

std::optional<ScoreMode> softcap_or_alibi_score(const attention::AttentionParams& p) {
  if (has_only_softcap(p)) return ScoreMode::kSoftcap;
  if (has_only_alibi(p)) return ScoreMode::kAlibi;
  const bool is_capped = p.score_mod.softcap != 0.0;
  const bool has_both_or_none = is_capped == p.score_mod.alibi.present();
  if (has_both_or_none || p.score_mod.bias.present() || p.dropout.enabled()) return std::nullopt;
  const double scale = p.score_mod.scale;
  const bool scale_suits = is_capped ? scale > 0.0 : may_divide_by(scale);
  if (!has_bits_of_mask(p) || !scale_suits) return std::nullopt;
  return is_capped ? ScoreMode::kSoftcapMask : ScoreMode::kAlibiMask;
}

ScoreMode score_mode_sm90(const attention::AttentionParams& p) {
  const attention::ScoreMod& mod = p.score_mod;
  const ScoreKind kind = score_kind(mod);
  if (kind == ScoreKind::kScale) return p.dropout.enabled() ? ScoreMode::kDropout : ScoreMode::kScaleOnly;
  if (kind == ScoreKind::kAny) return ScoreMode::kGeneric;
  if (mod.hides_keys() && !has_bits_of_mask(p)) return ScoreMode::kGeneric;
  if (!mod.bias.present()) return p.dropout.enabled() ? ScoreMode::kMaskDropout : ScoreMode::kMask;
  if (!has_bias_boxes(mod.bias)) return ScoreMode::kGeneric;
  return p.dropout.enabled() ? ScoreMode::kBiasMaskDropout : ScoreMode::kBiasMask;
}

bool may_write_bias_boxes(const attention::AttentionParams& p, const Limits& limits) {
  return !p.score_mod.bias.is_relative() || relative_bias_boxes(p).bytes() <= limits.max_materialised_bytes;
}

ScoreMode score_mode_sm90(const attention::AttentionParams& p, const Limits& limits) {
  const ScoreMode score = score_mode_sm90(p);
  return reads_bias_boxes(score) && !may_write_bias_boxes(p, limits) ? ScoreMode::kGeneric : score;
}

}  // namespace flash_attn_ext::plan
