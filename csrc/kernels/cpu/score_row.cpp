#include "kernels/cpu/score_row.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <limits>
#include <type_traits>

#include "kernels/cpu/row_ops.h"

namespace flash_attn_ext::cpu {
namespace {

using attention::BroadcastView;
using attention::ElementType;

template <class Element, class Real>
void add_bias_of_type(const BroadcastView& bias, const ScoreRun& run, Real* added) {
  const Element* source = static_cast<const Element*>(bias.data) + bias.offset(run.first);
  const int64_t stride = bias.key_stride;
  if constexpr (std::is_same_v<Real, float> && std::is_same_v<Element, float>) {
    if (stride == 1) return add_row(added, source, run.count);
  } else if constexpr (std::is_same_v<Real, float> && std::is_same_v<Element, c10::BFloat16>) {
    if (stride == 1) return add_row(added, reinterpret_cast<const uint16_t*>(source), run.count);
  }
  for (int64_t i = 0; i < run.count; ++i) added[i] += static_cast<Real>(source[i * stride]);
}

template <class Real>
void add_bias(const BroadcastView& bias, const ScoreRun& run, Real* added) {
  switch (bias.element) {
    case ElementType::kFloat32:
      return add_bias_of_type<float>(bias, run, added);
    case ElementType::kFloat64:
      return add_bias_of_type<double>(bias, run, added);
    case ElementType::kBFloat16:
      return add_bias_of_type<c10::BFloat16>(bias, run, added);
    case ElementType::kFloat16:
      return add_bias_of_type<c10::Half>(bias, run, added);
    case ElementType::kBool:
      return;  // a bool bias is a mask
  }
}

template <class Real>
void apply_mask(const BroadcastView& mask, const ScoreRun& run, Real* added) {
  const uint8_t* source = static_cast<const uint8_t*>(mask.data) + mask.offset(run.first);
  const int64_t stride = mask.key_stride;
  constexpr Real kMasked = -std::numeric_limits<Real>::infinity();
  if (stride == 1) return mask_row(added, source, run.count);
  for (int64_t i = 0; i < run.count; ++i) added[i] = source[i * stride] != 0 ? added[i] : kMasked;
}

// d score / d slope of the run's i-th score.
int64_t alibi_derivative_at(const ScoreRun& run, int64_t diagonal, int64_t i) {
  return attention::alibi_derivative(run.first.query, run.first.key + i, diagonal);
}

}  // namespace

template <class Real>
void load_added(const attention::ScoreMod& score_mod, const ScoreRun& run, int64_t diagonal, Real* added) {
  if (score_mod.alibi.present()) {
    const Real slope = score_mod.alibi.at<Real>(run.first.batch, run.first.head);
    for (int64_t i = 0; i < run.count; ++i) {
      added[i] = slope * static_cast<Real>(alibi_derivative_at(run, diagonal, i));
    }
  } else {
    std::fill(added, added + run.count, Real(0));
  }
  if (score_mod.bias.present()) add_bias(score_mod.bias, run, added);
  if (score_mod.mask.present()) apply_mask(score_mod.mask, run, added);
}

template <class Real>
double alibi_slope_gradient(const ScoreRun& run, int64_t diagonal, const Real* dscore) {
  double sum = 0.0;
  for (int64_t i = 0; i < run.count; ++i) {
    sum += static_cast<double>(dscore[i]) * static_cast<double>(alibi_derivative_at(run, diagonal, i));
  }
  return sum;
}

template <class Real>
void load_keep(const attention::Dropout& dropout, const ScoreRun& run, Real* keep) {
  if (!dropout.enabled()) {
    std::fill(keep, keep + run.count, Real(1));
    return;
  }
  const Real rescale = static_cast<Real>(dropout.rescale);
  // Draws are shared by elements 8 apart: one call serves up to 4 of them.
  constexpr int64_t kBlock = attention::Dropout::kBlockKeys;
  const int64_t first = run.first.key;
  const int64_t end = first + run.count;
  for (int64_t block_begin = first - first % kBlock; block_begin < end; block_begin += kBlock) {
    for (int64_t key = block_begin; key < block_begin + 8; ++key) {
      const attention::PhiloxCounter draws = dropout.draws(run.first.batch, run.first.head, run.first.query, key);
      for (int64_t at = key; at < std::min(block_begin + kBlock, end); at += 8) {
        if (at >= first) keep[at - first] = dropout.keeps(draws, run.first.query, at) ? rescale : Real(0);
      }
    }
  }
}

#define FLASH_INSTANTIATE(Real)                                                                \
  template void load_added<Real>(const attention::ScoreMod&, const ScoreRun&, int64_t, Real*); \
  template double alibi_slope_gradient<Real>(const ScoreRun&, int64_t, const Real*);           \
  template void load_keep<Real>(const attention::Dropout&, const ScoreRun&, Real*);
FLASH_INSTANTIATE(float)
FLASH_INSTANTIATE(double)
#undef FLASH_INSTANTIATE

}  // namespace flash_attn_ext::cpu
