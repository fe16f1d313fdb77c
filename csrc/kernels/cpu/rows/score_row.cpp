#include "kernels/cpu/rows/score_row.h"

#include <algorithm>
#include <array>
#include <limits>
#include <type_traits>

#include "kernels/cpu/rows/row_ops.h"

namespace flash_attn_ext::cpu {
namespace {

using attention::BroadcastView;
using attention::ElementType;

// Calls function with the run's first element of a bias, in its C++ type.
template <class Function>
void with_bias(const BroadcastView& bias, const ScoreRun& run, Function&& function) {
  const int64_t offset = bias.offset(run.first);
  switch (bias.element) {
    case ElementType::kFloat32:
      return function(static_cast<const float*>(bias.data) + offset);
    case ElementType::kFloat64:
      return function(static_cast<const double*>(bias.data) + offset);
    case ElementType::kBFloat16:
      return function(static_cast<const BFloat16*>(bias.data) + offset);
    case ElementType::kFloat16:
      return function(static_cast<const Float16*>(bias.data) + offset);
    case ElementType::kBool:
      return;  // a bool bias is a mask
  }
}

template <class Real>
void add_bias(const BroadcastView& bias, const ScoreRun& run, Real* added) {
  with_bias(bias, run, [&](const auto* source) {
    for (int64_t i = 0; i < run.count; ++i) added[i] += static_cast<Real>(source[i * bias.key_stride]);
  });
}

// Loads a bias to which nothing was added before: in place if possible, else converted into scratch.
template <class Real>
const Real* load_bias(const BroadcastView& bias, const ScoreRun& run, Real* scratch) {
  const Real* loaded = scratch;
  with_bias(bias, run, [&](const auto* source) {
    using Element = std::remove_const_t<std::remove_pointer_t<decltype(source)>>;
    if constexpr (std::is_same_v<Element, Real>) {
      if (bias.key_stride == 1) {
        loaded = source;
        return;
      }
    } else if constexpr (std::is_same_v<Real, float> && sizeof(Element) == 2) {
      if (bias.key_stride == 1) return convert_row(scratch, source, run.count);
    }
    for (int64_t i = 0; i < run.count; ++i) scratch[i] = static_cast<Real>(source[i * bias.key_stride]);
  });
  return loaded;
}

// masked[i] = added[i], or -inf where the mask is False.
template <class Real>
void apply_mask(const BroadcastView& mask, const ScoreRun& run, const Real* added, Real* masked) {
  const uint8_t* source = static_cast<const uint8_t*>(mask.data) + mask.offset(run.first);
  if (mask.key_stride == 1) return mask_row(masked, added, source, run.count);
  constexpr Real kMasked = -std::numeric_limits<Real>::infinity();
  for (int64_t i = 0; i < run.count; ++i) masked[i] = source[i * mask.key_stride] != 0 ? added[i] : kMasked;
}

// hidden[i] = added[i], or -inf where no interval has the key.
template <class Real>
void apply_intervals(const attention::RowIntervals& intervals, const attention::Sequence& sequence, const ScoreRun& run,
                     const Real* added, Real* hidden) {
  constexpr Real kHidden = -std::numeric_limits<Real>::infinity();
  const int32_t* row = intervals.row(sequence, run.first.head, run.first.query);
  std::array<attention::Interval, attention::RowIntervals::kMost> seen;  // by their begin
  for (int m = 0; m < intervals.count; ++m) {
    const auto within = [&](int64_t key) { return std::clamp<int64_t>(key - run.first.key, 0, run.count); };
    const attention::Interval interval = {within(row[2 * m]), within(row[2 * m + 1])};
    int place = m;
    for (; place > 0 && interval.begin < seen[place - 1].begin; --place) seen[place] = seen[place - 1];
    seen[place] = interval;
  }
  if (added != hidden) std::copy_n(added, run.count, hidden);
  int64_t done = 0;
  for (int m = 0; m < intervals.count; ++m) {
    if (seen[m].empty()) continue;
    if (done < seen[m].begin) std::fill(hidden + done, hidden + seen[m].begin, kHidden);
    done = std::max(done, seen[m].end);
  }
  std::fill(hidden + done, hidden + run.count, kHidden);
}

// hidden[i] = added[i], or -inf where no block that the query sees has the key.
template <class Real>
void apply_blocks(const attention::BlockMask& blocks, const ScoreRun& run, const Real* added, Real* hidden) {
  constexpr Real kHidden = -std::numeric_limits<Real>::infinity();
  const uint8_t* row = blocks.row(run.first.batch, run.first.head, run.first.query);
  if (added != hidden) std::copy_n(added, run.count, hidden);
  const int64_t block = int64_t{1} << blocks.key_shift;
  const int64_t end = run.first.key + run.count;
  for (int64_t key = run.first.key / block * block; key < end; key += block) {
    if (blocks.sees(row, key)) continue;
    const int64_t first = std::max(key, run.first.key);
    std::fill(hidden + (first - run.first.key), hidden + (std::min(key + block, end) - run.first.key), kHidden);
  }
}

// d score / d slope of the run's i-th score.
int64_t alibi_derivative_at(const ScoreRun& run, int64_t diagonal, int64_t i) {
  return attention::alibi_derivative(run.first.query, run.first.key + i, diagonal);
}

}  // namespace

template <class Real>
const Real* load_added(const attention::ScoreMod& score_mod, const ScoreRun& run, const attention::Sequence& sequence,
                       int64_t diagonal, Real* scratch) {
  const Real* added = scratch;
  if (score_mod.alibi.present()) {
    const Real slope = score_mod.alibi.at<Real>(run.first.batch, run.first.head);
    for (int64_t i = 0; i < run.count; ++i) {
      scratch[i] = slope * static_cast<Real>(alibi_derivative_at(run, diagonal, i));
    }
    if (score_mod.bias.present()) add_bias(score_mod.bias, run, scratch);
  } else if (score_mod.bias.present()) {
    added = load_bias(score_mod.bias, run, scratch);
  } else {
    std::fill(scratch, scratch + run.count, Real(0));
  }
  if (score_mod.mask.present()) {
    apply_mask(score_mod.mask, run, added, scratch);
    added = scratch;
  }
  if (score_mod.intervals.present()) {
    apply_intervals(score_mod.intervals, sequence, run, added, scratch);
    added = scratch;
  }
  if (score_mod.blocks.present()) {
    apply_blocks(score_mod.blocks, run, added, scratch);
    added = scratch;
  }
  return added;
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

#define FLASH_INSTANTIATE(Real)                                                                                  \
  template const Real* load_added<Real>(const attention::ScoreMod&, const ScoreRun&, const attention::Sequence&, \
                                        int64_t, Real*);                                                         \
  template double alibi_slope_gradient<Real>(const ScoreRun&, int64_t, const Real*);                             \
  template void load_keep<Real>(const attention::Dropout&, const ScoreRun&, Real*);
FLASH_INSTANTIATE(float)
FLASH_INSTANTIATE(double)
#undef FLASH_INSTANTIATE

}  // namespace flash_attn_ext::cpu
