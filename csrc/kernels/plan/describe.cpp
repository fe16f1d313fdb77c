#include <algorithm>
#include <sstream>
#include <utility>
#include <vector>

#include "kernels/plan/plan.h"

namespace flash_attn_ext::plan {
namespace {

const char* name_of(Variant variant) {
  switch (variant) {
    case Variant::kPlain:
      return "plain";
    case Variant::kParts:
      return "plain";
    case Variant::kShort:
      return "short";
    case Variant::kSmall:
      return "small";
    case Variant::kTall:
      return "tall";
    case Variant::kAllKeys:
      return "all keys";
    case Variant::kDropout:
      return "dropout";
    case Variant::kMask:
      return "mask";
    case Variant::kBiasMask:
      return "bias and mask";
    case Variant::kModified:
      return "modified";
    case Variant::kExtended:
      return "extended";
  }
  return "?";
}

const char* name_of(DeltaSource source) {
  switch (source) {
    case DeltaSource::kNone:
      return "no delta";
    case DeltaSource::kOwnKernel:
      return "delta by its own kernel";
    case DeltaSource::kFirstKernel:
      return "delta by the first kernel";
    case DeltaSource::kExactKernel:
      return "exact delta by its own kernel";
  }
  return "?";
}

using Parts = std::vector<std::pair<const char*, WorkspacePart>>;

std::string workspace_words(int64_t bytes, const Parts& parts) {
  if (bytes == 0) return "no workspace";
  std::ostringstream words;
  words << "workspace " << bytes << " bytes (";
  const char* separator = "";
  for (const auto& [name, part] : parts) {
    if (!part.present()) continue;
    words << separator << name << " " << part.bytes;
    separator = ", ";
  }
  words << ")";
  return words.str();
}

std::string kernel_words(Variant variant, int head_dim, bool tf32) {
  return std::string(name_of(variant)) + (tf32 ? " TF32" : "") + ", head dim " + std::to_string(head_dim);
}

std::string stored_words(const BackwardPlan& plan) {
  std::ostringstream words;
  words << " in " << plan.stored.launches << (plan.stored.launches == 1 ? " launch" : " launches") << " of up to "
        << plan.stored.pairs_per_launch << " key heads";
  if (!plan.stored.band_ends.empty()) words << ", of a part of their queries";
  return words.str();
}

std::string kernels_words(const BackwardPlan& plan) {
  const std::string parts = plan.dq_parts > 1 ? ", keys in " + std::to_string(plan.dq_parts) + " parts" : "";
  const std::string dq = "dQ (" + kernel_words(plan.dq_variant, plan.dq_head_dim, plan.tf32) + parts + ")";
  const std::string dkdv = "dK and dV (" + kernel_words(plan.dkdv_variant, plan.dkdv_head_dim, plan.tf32) + ")";
  switch (plan.kernels) {
    case BackwardKernels::kCpu:
      return "tiled on the CPU";
    case BackwardKernels::kRows:
      return "one warp per row, without tensor cores";
    case BackwardKernels::kFused:
      return "fused, " + std::to_string(plan.fused_keys) + " keys per block";
    case BackwardKernels::kRecompute:
      return dq + ", then " + dkdv + ", each computing the scores";
    case BackwardKernels::kStoreInDkdv:
      return dkdv + " storing dS, then dQ from dS" + parts + "," + stored_words(plan);
    case BackwardKernels::kStoreInDq:
      return dq + " storing P and dS, then dK and dV from them," + stored_words(plan);
    case BackwardKernels::kWarpSpecialised:
      return "warp-specialised" +
             (plan.dkdv_variant == Variant::kPlain ? "" : " (" + std::string(name_of(plan.dkdv_variant)) + ")") +
             ", head dim " + std::to_string(plan.dkdv_head_dim) + ", " + std::to_string(VisitOrder::kKeys) +
             " keys per block, dQ added in order" + (plan.order.cyclic ? ", going round" : "") + ", phases " +
             std::to_string(1 << plan.order.log2_phases) +
             (plan.order.log2_sums > 0 ? ", each with sums of its own" : "") +
             (plan.order.members > 1 ? ", " + std::to_string(plan.order.members) + " claims to a tile of keys" : "") +
             (plan.announces_visits ? ", visits announced" : "") +
             (plan.adds_statistics ? ", statistics added by products" : "");
    case BackwardKernels::kWarpSpecialisedFewQueries:
      return "warp-specialised (few queries), head dim " + std::to_string(plan.dkdv_head_dim) +
             ", keys divided among " + std::to_string(plan.resident_blocks) + " blocks, dQ added up afterwards";
    case BackwardKernels::kWarpSpecialisedStoring:
      return "warp-specialised (" + std::string(name_of(plan.dq_variant)) + ", head dims " +
             std::to_string(plan.dq_head_dim) + " and " + std::to_string(plan.head_dim_v) +
             "), dQ storing P and dS, then dK and dV from them," + stored_words(plan);
  }
  return "?";
}

}  // namespace

std::string describe(const ForwardPlan& plan) {
  std::ostringstream words;
  switch (plan.kernel) {
    case ForwardKernel::kCpu:
      words << "tiled on the CPU";
      if (plan.keys_per_part > 0) words << ", keys in parts of " << plan.keys_per_part;
      break;
    case ForwardKernel::kRows:
      words << "one warp per row, without tensor cores";
      break;
    case ForwardKernel::kStreaming:
      words << "streaming (" << kernel_words(plan.variant, plan.head_dim, plan.tf32) << "), " << plan.tile.queries
            << " queries x " << plan.tile.keys << " keys per tile";
      break;
    case ForwardKernel::kSplit:
      words << "keys divided among " << plan.resident_blocks << " blocks ("
            << (sm80::is_extended(plan.split_kind) ? "extended" : "plain") << ", head dim " << plan.head_dim << "), "
            << plan.tile.queries << " rows x " << plan.tile.keys << " keys per tile"
            << (plan.append_blocks > 0 ? ", new keys into the cache" : "");
      break;
    case ForwardKernel::kWarpSpecialised:
      words << "warp-specialised (" << name_of(plan.variant) << ", head dims " << plan.head_dim << " and "
            << plan.head_dim_v << "), " << plan.tile.queries << " queries x " << plan.tile.keys << " keys per tile";
      if (plan.variant == Variant::kParts) words << ", keys divided among " << plan.key_parts << " blocks";
      break;
    case ForwardKernel::kWholeHeads:
      words << "whole heads, " << sm80::kHeadsRows << " queries x " << sm80::kHeadsRows << " keys per tile";
      break;
  }
  words << "; "
        << workspace_words(plan.workspace.bytes, {{"mask tiles", plan.workspace.mask_tiles},
                                                  {"mask bits", plan.workspace.mask_bits},
                                                  {"NaN flags", plan.workspace.nan_flags},
                                                  {"tile list", plan.workspace.tile_list},
                                                  {"parts of O", plan.workspace.part_rows},
                                                  {"parts' sums", plan.workspace.part_states},
                                                  {"part list", plan.workspace.part_list},
                                                  {"intervals of keys", plan.workspace.intervals},
                                                  {"their kernel", plan.workspace.of_intervals}});
  if (plan.of_intervals) {
    words << "; batch entries of which the mask leaves an interval of keys: " << describe(*plan.of_intervals);
  }
  return words.str();
}

std::string describe(const BackwardPlan& plan) {
  const BackwardPlan::Workspace& workspace = plan.workspace;
  std::ostringstream words;
  words << kernels_words(plan) << "; " << name_of(plan.delta);
  if (plan.dbias == BiasGradientSource::kRowSums) words << "; dBias from sums of rows";
  if (plan.dbias == BiasGradientSource::kSameDscores) words << "; dBias from the same dS";
  if (plan.dbias == BiasGradientSource::kStored) words << "; dBias from the stored dS";
  if (plan.dbias == BiasGradientSource::kRecomputed) words << "; dBias computing the scores again";
  words << "; "
        << workspace_words(workspace.bytes, {{"delta", workspace.delta},
                                             {"stored scores", workspace.stored_scores},
                                             {"mask tiles", workspace.mask_tiles},
                                             {"mask bits", workspace.mask_bits},
                                             {"ALiBi partial sums", workspace.alibi_partials},
                                             {"dQ NaN flags", workspace.dq_nan_flags},
                                             {"dK and dV NaN flags", workspace.dkdv_nan_flags},
                                             {"parts of dQ", workspace.dq_parts},
                                             {"sums of dQ", workspace.dq_sums},
                                             {"statistics", workspace.statistics},
                                             {"turns", workspace.turns},
                                             {"tiles of keys", workspace.key_tiles},
                                             {"claims", workspace.claims},
                                             {"sums of dK and dV", workspace.key_sums},
                                             {"arrivals", workspace.arrivals}});
  return words.str();
}

std::string describe(const TangentPlan& plan) { return "one kernel, head dim " + std::to_string(plan.head_dim); }

}  // namespace flash_attn_ext::plan
