#include "host/report/inspect.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "attention/visibility.h"
#include "host/checks/checks.h"
#include "host/make_params.h"

namespace flash_attn_ext::host {
namespace {

void check_size(const char* name, int64_t size) {
  constexpr int64_t kLongest = attention::kLongestSequence;
  TORCH_CHECK_VALUE(size >= 0 && size <= kLongest, name, " is ", size, ", expected 0 to ", kLongest);
}

attention::Sequence dense_sequence(int64_t seqlen_q, int64_t seqlen_k) {
  check_size("seqlen_q", seqlen_q);
  check_size("seqlen_k", seqlen_k);
  return {0, 0, 0, seqlen_q, seqlen_k};
}

template <class IntervalOf>
at::Tensor tabulate(int64_t rows, IntervalOf&& interval_of) {
  at::Tensor table = at::empty({rows, 2}, at::kLong);
  auto cells = table.accessor<int64_t, 2>();
  for (int64_t row = 0; row < rows; ++row) {
    const attention::Interval interval = interval_of(row);
    cells[row][0] = interval.begin;
    cells[row][1] = std::max(interval.begin, interval.end);
  }
  return table;
}

}  // namespace

at::Tensor visible_keys(int64_t seqlen_q, int64_t seqlen_k, const std::optional<std::string>& causal,
                        const std::optional<int64_t>& window_left, const std::optional<int64_t>& window_right) {
  check_visibility(causal, window_left, window_right);
  const attention::Sequence sequence = dense_sequence(seqlen_q, seqlen_k);
  const attention::Visibility visibility = make_visibility(causal, window_left, window_right);
  return tabulate(seqlen_q, [&](int64_t query) { return visibility.keys_of(query, sequence); });
}

at::Tensor visible_queries(int64_t seqlen_q, int64_t seqlen_k, const std::optional<std::string>& causal,
                           const std::optional<int64_t>& window_left, const std::optional<int64_t>& window_right) {
  check_visibility(causal, window_left, window_right);
  const attention::Sequence sequence = dense_sequence(seqlen_q, seqlen_k);
  const attention::Visibility visibility = make_visibility(causal, window_left, window_right);
  return tabulate(seqlen_k, [&](int64_t key) { return visibility.queries_of(key, sequence); });
}

at::Tensor dropout_mask(const at::Tensor& rng_seed, double dropout_p, const DropoutShape& shape) {
  check_dropout_probability(dropout_p);
  check_rng_seed(rng_seed, rng_seed.device());
  check_size("batch", shape.batch);
  check_size("num_heads", shape.num_heads);
  check_size("seqlen_q", shape.seqlen_q);
  check_size("seqlen_k", shape.seqlen_k);
  if (dropout_p == 1.0) {
    return at::zeros({shape.batch, shape.num_heads, shape.seqlen_q, shape.seqlen_k}, at::kBool);
  }
  const at::Tensor seed = rng_seed.cpu();
  at::Tensor mask = at::ones({shape.batch, shape.num_heads, shape.seqlen_q, shape.seqlen_k}, at::kBool);
  if (dropout_p == 0.0) return mask;
  const attention::Dropout dropout = make_dropout(dropout_p, seed);
  auto kept = mask.accessor<bool, 4>();
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t h = 0; h < shape.num_heads; ++h) {
      for (int64_t q = 0; q < shape.seqlen_q; ++q) {
        for (int64_t k = 0; k < shape.seqlen_k; ++k) kept[b][h][q][k] = dropout.keeps(dropout.draws(b, h, q, k), q, k);
      }
    }
  }
  return mask;
}

}  // namespace flash_attn_ext::host
