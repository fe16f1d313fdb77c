// What all tables of kernels share: what a kernel can do to a score, and the tile of a CTA that has stationary queries.
#pragma once

#include <cstdint>

#include "attention/division.h"

namespace flash_attn_ext {

// One column of the tables.
enum class ScoreMode {
  kScaleOnly,               // a positive scale, and nothing else that changes a score
  kDropout,                 // scale and dropout
  kMask,                    // scale and a boolean mask, intervals or lists of blocks
  kMaskDropout,             // the same and dropout
  kSoftcap,                 // a scale of any sign, then a softcap
  kSoftcapMask,             // a positive scale, a softcap, and what kMask has
  kAlibi,                   // a positive scale and ALiBi slopes
  kAlibiMask,               // a positive scale, ALiBi slopes, and what kMask has
  kKeyBias,                 // a positive scale and a bias that is broadcast along queries
  kKeyBiasDropout,          // the same and dropout
  kBiasMask,                // scale and a bias, a mask or both
  kBiasMaskDropout,         // the same and dropout
  kGenericWithoutBiasMask,  // everything but a bias and a mask
  kGenericWithoutBias,      // everything but a bias, and what kMask has
  kGeneric,                 // everything
};

constexpr const char* name_of(ScoreMode score) {
  switch (score) {
    case ScoreMode::kScaleOnly:
      return "scale only";
    case ScoreMode::kDropout:
      return "dropout";
    case ScoreMode::kMask:
      return "mask";
    case ScoreMode::kMaskDropout:
      return "mask and dropout";
    case ScoreMode::kSoftcap:
      return "softcap";
    case ScoreMode::kSoftcapMask:
      return "softcap and mask";
    case ScoreMode::kAlibi:
      return "ALiBi";
    case ScoreMode::kAlibiMask:
      return "ALiBi and mask";
    case ScoreMode::kKeyBias:
      return "key bias";
    case ScoreMode::kKeyBiasDropout:
      return "key bias and dropout";
    case ScoreMode::kBiasMask:
      return "bias and mask";
    case ScoreMode::kBiasMaskDropout:
      return "bias, mask and dropout";
    case ScoreMode::kGenericWithoutBiasMask:
      return "generic without bias and mask";
    case ScoreMode::kGenericWithoutBias:
      return "generic without bias";
    case ScoreMode::kGeneric:
      return "generic";
  }
  return "?";
}

// What kernels of a score mode do, apart from those that read a bias and from generic ones: whether a mask, intervals
// or lists of blocks hide keys from them, and whether they cap scores or add ALiBi.
constexpr bool has_mask(ScoreMode score) {
  return score == ScoreMode::kMask || score == ScoreMode::kMaskDropout || score == ScoreMode::kSoftcapMask ||
         score == ScoreMode::kAlibiMask;
}
constexpr bool caps_scores(ScoreMode score) { return score == ScoreMode::kSoftcap || score == ScoreMode::kSoftcapMask; }
constexpr bool adds_alibi(ScoreMode score) { return score == ScoreMode::kAlibi || score == ScoreMode::kAlibiMask; }

// Whether kernels of a score mode drop weights. Generic ones may.
constexpr bool always_drops(ScoreMode score) {
  return score == ScoreMode::kDropout || score == ScoreMode::kMaskDropout || score == ScoreMode::kKeyBiasDropout ||
         score == ScoreMode::kBiasMaskDropout;
}

// Whether Hopper's kernels of a score mode load tiles of a bias by TMA.
constexpr bool reads_bias_boxes(ScoreMode score) {
  return score == ScoreMode::kBiasMask || score == ScoreMode::kBiasMaskDropout;
}

// The tile of a CTA: `queries` rows of Q stay, and tiles of `keys` stream past. Each warp owns queries / warps rows.
// The CTA computes `columns` columns of the result. Where these are fewer than the head dim, several CTAs share a tile,
// and each computes the scores again.
struct TileShape {
  int queries;
  int keys;
  int warps;
  int columns;
  int ctas_per_sm = 1;  // at least; with 1 a thread has all the registers that it can have
  int stages = 1;       // tiles of K and V in flight; the portable dQ kernel has one

  bool operator==(const TileShape&) const = default;
};

// CTAs that share a tile of rows. There is one even if there is no column, because it also writes the LSE.
constexpr int64_t num_slices(int64_t head_dim, int64_t columns) {
  return head_dim <= columns ? 1 : attention::ceil_div(head_dim, columns);
}

}  // namespace flash_attn_ext
