// Plans which score mode a call has on Hopper.
#include <optional>

#include "attention/aligned_bias.h"
#include "attention/key_bias.h"
#include "kernels/plan/sm80/sm80.h"
#include "kernels/plan/sm90/sm90.h"
#include "kernels/schedule/relative_bias_boxes.h"

namespace flash_attn_ext::plan {
namespace {

// Whether a mask has about as many elements as its packed bits. One that is broadcast over keys has far fewer.
bool is_worth_packing(const attention::BroadcastView& mask) { return mask.key_stride != 0; }

// Whether nothing but a scale of any sign changes scores, and no weight is dropped.
bool only_scales_scores(const attention::ScoreMod& mod, const attention::Dropout& dropout) {
  return mod.plain() && !dropout.enabled();
}

}  // namespace

bool has_bias_boxes(const attention::BroadcastView& bias) {
  if (bias.is_relative()) return true;  // the boxes are written first
  return bias.key_stride == 1 && bias.query_stride != 0 &&
         (bias.query_stride | bias.head_stride | bias.batch_stride) % attention::AlignedBias::kChunk == 0 &&
         reinterpret_cast<uintptr_t>(bias.data) % 16 == 0;
}

bool has_only_alibi(const attention::AttentionParams& p) {
  attention::ScoreMod others = p.score_mod;
  others.alibi = {};
  return p.score_mod.alibi.present() && only_scales_scores(others, p.dropout) && others.scale > 0.0;
}

bool has_causal_alibi(const attention::AttentionParams& p) { return has_only_alibi(p) && p.visibility.right == 0; }

std::optional<ScoreMode> key_bias_score(const attention::AttentionParams& p) {
  attention::ScoreMod others = p.score_mod;
  others.bias = {};
  const attention::BroadcastView& bias = p.score_mod.bias;
  const bool is_all = bias.is_of_keys() && others.plain() && others.scale > 0.0 && p.visibility.unlimited();
  if (!is_all || bias.key_stride != 1 || bias.element != p.element) return std::nullopt;
  return p.dropout.enabled() ? ScoreMode::kKeyBiasDropout : ScoreMode::kKeyBias;
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

bool has_only_softcap(const attention::AttentionParams& p) {
  attention::ScoreMod others = p.score_mod;
  others.softcap = 0.0;
  return p.score_mod.softcap != 0.0 && only_scales_scores(others, p.dropout);
}

ScoreMode score_mode_sm90(const attention::AttentionParams& p) {
  const attention::ScoreMod& mod = p.score_mod;
  const ScoreKind kind = score_kind(mod);
  if (kind == ScoreKind::kScale) return p.dropout.enabled() ? ScoreMode::kDropout : ScoreMode::kScaleOnly;
  if (kind == ScoreKind::kAny) return ScoreMode::kGeneric;
  if (mod.mask.present() && !is_worth_packing(mod.mask)) return ScoreMode::kGeneric;
  // The bits of both would take as much memory as a mask for each pair, whatever the mask's own size.
  if (mod.mask.present() && mod.selects_keys()) return ScoreMode::kGeneric;
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
