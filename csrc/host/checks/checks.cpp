#include "host/checks/checks.h"

#include <ATen/ops/aminmax.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "attention/division.h"
#include "attention/row_intervals.h"
#include "attention/visibility.h"
#include "host/call/fields.h"
#include "host/checks/hints.h"
#include "host/checks/sequence_lengths.h"
#include "host/checks/tensor_checks.h"

namespace flash_attn_ext::host {
namespace {

void check_qkv(const AttentionInputs& in) {
  check_dense("q", in.q);
  check_dense("k", in.k);
  check_dense("v", in.v);
  check_element_type("q", in.q, "q, k and v");
  check_dtype_and_device("k", in.k, in.q);
  check_dtype_and_device("v", in.v, in.q);
  const int64_t rank = in.packed() ? 3 : 4;
  const char* layout = in.packed() ? "(total tokens, heads, head dim)" : "(batch, heads, sequence, head dim)";
  check_rank("q", in.q, rank, layout);
  check_rank("k", in.k, rank, layout);
  check_rank("v", in.v, rank, layout);
  if (!in.packed()) {
    check_size("k", "batch size", in.k.size(0), in.q.size(0), "q");
    check_size("v", "batch size", in.v.size(0), in.q.size(0), "q");
  }
  const int64_t sequence_dim = in.packed() ? 0 : 2;
  check_size("v", "sequence length", in.v.size(sequence_dim), in.k.size(sequence_dim), "k");
  check_size("v", "number of heads", in.v.size(1), in.k.size(1), "k");
  check_size("k", "head dim", in.k.size(-1), in.q.size(-1), "q");
  check_head_counts(in, "k");
}

void check_sequence_offsets(const AttentionInputs& in) {
  TORCH_CHECK(in.cu_seqlens_q.has_value() == in.cu_seqlens_k.has_value(), "only ",
              in.cu_seqlens_q.has_value() ? "cu_seqlens_q" : "cu_seqlens_k",
              " was given; packed attention needs both cu_seqlens_q and cu_seqlens_k");
  TORCH_CHECK(in.packed() || (!in.max_seqlen_q && !in.max_seqlen_k),
              "max_seqlen_q and max_seqlen_k belong to packed attention; pass cu_seqlens_q and cu_seqlens_k too");
}

void check_cu_seqlens(const char* name, const at::Tensor& cu_seqlens, const at::Tensor& tokens, const char* of) {
  check_dense(name, cu_seqlens);
  TORCH_CHECK(cu_seqlens.scalar_type() == at::kInt, name, " has dtype ", dtype_name(cu_seqlens.scalar_type()),
              ", expected int32; cast with ", name, ".to(torch.int32)");
  TORCH_CHECK(cu_seqlens.dim() == 1 && cu_seqlens.size(0) >= 1, name, " has shape ", cu_seqlens.sizes(),
              ", expected (batch + 1,): 0 and the running sum of the sequence lengths");
  check_device(name, cu_seqlens, tokens);
  if (!cu_seqlens.is_cpu()) return;  // reading it would stall the device; kernels clamp what they read
  const auto offsets = cu_seqlens.accessor<const int32_t, 1>();
  TORCH_CHECK(offsets[0] == 0, name, "[0] is ", offsets[0], ", expected 0");
  for (int64_t i = 1; i < offsets.size(0); ++i) {
    TORCH_CHECK(offsets[i] >= offsets[i - 1], name, " decreases: ", name, "[", i - 1, "] = ", offsets[i - 1], " and ",
                name, "[", i, "] = ", offsets[i], "; it must be the running sum of the sequence lengths");
  }
  const int64_t last = offsets[offsets.size(0) - 1];
  TORCH_CHECK(last == tokens.size(0), name, " ends at ", last, ", but ", of, " has ", tokens.size(0),
              " tokens; its last entry must be the total number of tokens");
}

void check_max_seqlen(const char* name, const std::optional<int64_t>& max_seqlen, const at::Tensor& cu_seqlens) {
  if (!max_seqlen) return;
  TORCH_CHECK_VALUE(*max_seqlen >= 0, name, " is ", *max_seqlen, ", expected 0 or more, or None");
  if (!cu_seqlens.is_cpu()) return;
  const int64_t longest = longest_sequence(cu_seqlens);
  TORCH_CHECK_VALUE(*max_seqlen >= longest, name, " is ", *max_seqlen, ", but the longest sequence has ", longest,
                    " tokens; pass an upper bound or None");
}

void check_packed(const AttentionInputs& in) {
  if (!in.packed()) return;
  check_cu_seqlens("cu_seqlens_q", *in.cu_seqlens_q, in.q, "q");
  check_cu_seqlens("cu_seqlens_k", *in.cu_seqlens_k, in.k, "k");
  check_size("cu_seqlens_k", "length", in.cu_seqlens_k->size(0), in.cu_seqlens_q->size(0), "cu_seqlens_q");
  check_max_seqlen("max_seqlen_q", in.max_seqlen_q, *in.cu_seqlens_q);
  check_max_seqlen("max_seqlen_k", in.max_seqlen_k, *in.cu_seqlens_k);
}

void check_lengths(const AttentionInputs& in) {
  const SequenceLengths longest = longest_sequences(in);
  constexpr int64_t kLongest = attention::kLongestSequence;
  TORCH_CHECK(longest.queries <= kLongest && longest.keys <= kLongest, "q has sequences of up to ", longest.queries,
              " tokens and k of up to ", longest.keys, ", expected at most ", kLongest, " (2^29); ",
              in.packed() ? "pass max_seqlen_q and max_seqlen_k, or shorter ones" : "split the sequences");
}

std::array<int64_t, 4> sizes_of_scores(const AttentionInputs& in, const SequenceLengths& longest) {
  return {in.batch(), in.num_heads_q(), longest.queries, longest.keys};
}

void check_broadcastable(const char* name, const at::Tensor& tensor, const AttentionInputs& in,
                         const SequenceLengths& longest) {
  check_dense(name, tensor);
  check_device(name, tensor, in.q);
  TORCH_CHECK(broadcasts_to_scores(tensor, in, longest), name, " has shape ", tensor.sizes(),
              ", expected one that broadcasts to ", at::IntArrayRef(sizes_of_scores(in, longest)),
              " (batch, query heads, queries, keys)", hint_at_dimensions(name, tensor, in, longest));
}

void check_relative_bias(const at::Tensor& bias, const AttentionInputs& in, const SequenceLengths& longest) {
  check_dense("bias", bias);
  check_device("bias", bias, in.q);
  TORCH_CHECK(!in.packed(),
              "bias_is_relative does not go with packed sequences; pass q, k and v with a batch dimension");
  const int64_t diagonals = std::max<int64_t>(longest.queries + longest.keys - 1, 0);
  const bool fits = bias.dim() == 4 && bias.size(0) == 1 && (bias.size(1) == 1 || bias.size(1) == in.num_heads_q()) &&
                    bias.size(2) == 1 && bias.size(3) == diagonals && (diagonals < 2 || bias.stride(3) == 1);
  TORCH_CHECK(fits, "bias has shape ", bias.sizes(), " and strides ", bias.strides(), ", expected (1, 1 or ",
              in.num_heads_q(), ", 1, ", diagonals, ") with stride 1 in the last dimension: a value per key - query");
}

// Checks that the begins and ends of a part of the intervals are positions of keys.
void check_positions(const at::Tensor& intervals, int64_t num_keys) {
  if (intervals.numel() == 0) return;
  const auto [least, largest] = at::aminmax(intervals);
  TORCH_CHECK_VALUE(least.item<int>() >= 0 && largest.item<int>() <= num_keys, "intervals has values from ",
                    least.item<int>(), " to ", largest.item<int>(), ", expected positions from 0 to ", num_keys,
                    ", the number of keys; clamp them with intervals.clamp(0, ", num_keys, ")");
}

void check_intervals(const at::Tensor& intervals, const AttentionInputs& in, const SequenceLengths& longest) {
  check_dense("intervals", intervals);
  check_device("intervals", intervals, in.q);
  TORCH_CHECK(intervals.scalar_type() == at::kInt, "intervals has dtype ", dtype_name(intervals.scalar_type()),
              ", expected int32; cast with intervals.to(torch.int32)");
  const int64_t rank = in.packed() ? 3 : 4;
  constexpr int64_t kMost = 2 * attention::RowIntervals::kMost;
  const auto matches = [&](int64_t d, int64_t size) { return intervals.size(d) == 1 || intervals.size(d) == size; };
  const bool fits = intervals.dim() == rank && (in.packed() || matches(0, in.batch())) &&
                    matches(rank - 3, in.num_heads_q()) &&
                    intervals.size(-2) == (in.packed() ? in.q.size(0) : longest.queries);
  TORCH_CHECK(fits, "intervals has shape ", intervals.sizes(), ", expected ",
              in.packed() ? "(heads or 1, tokens, 2 n)" : "(batch or 1, heads or 1, queries, 2 n)", " with ",
              in.packed() ? "" : c10::str(in.batch(), " batch entries, "), in.num_heads_q(), " heads and ",
              in.packed() ? in.q.size(0) : longest.queries, in.packed() ? " tokens" : " queries");
  const int64_t columns = intervals.size(-1);
  TORCH_CHECK(columns % 2 == 0 && columns > 0 && columns <= kMost, "intervals has ", columns,
              " columns, expected 2, 4, 6 or 8: a begin and an end for each of up to ", attention::RowIntervals::kMost,
              " intervals; a mask that needs more goes to mask=");
  if (!intervals.is_cpu()) return;  // reading it would stall the device; kernels clamp what they read
  if (!in.packed()) return check_positions(intervals, longest.keys);
  const auto queries = in.cu_seqlens_q->accessor<const int32_t, 1>();
  const auto keys = in.cu_seqlens_k->accessor<const int32_t, 1>();
  for (int64_t b = 0; b < in.batch(); ++b) {
    check_positions(intervals.narrow(1, queries[b], queries[b + 1] - queries[b]), keys[b + 1] - keys[b]);
  }
}

void check_blocks(const at::Tensor& blocks, const AttentionInputs& in, const SequenceLengths& longest) {
  TORCH_CHECK(!in.packed(), "lists of blocks are not taken with cu_seqlens: pass intervals or a mask");
  check_dense("block_lists", blocks);
  check_device("block_lists", blocks, in.q);
  TORCH_CHECK(blocks.scalar_type() == at::kBool, "the block mask of block_lists has dtype ",
              dtype_name(blocks.scalar_type()), ", expected bool, True = attend");
  const auto counts = [&](int64_t d, int64_t length) {
    return blocks.size(d) == attention::ceil_div(length, int64_t{64}) ||
           blocks.size(d) == attention::ceil_div(length, int64_t{128});
  };
  const auto matches = [&](int64_t d, int64_t size) { return blocks.size(d) == 1 || blocks.size(d) == size; };
  const bool fits = blocks.dim() == 4 && matches(0, in.batch()) && matches(1, in.num_heads_q()) &&
                    counts(2, longest.queries) && counts(3, longest.keys);
  TORCH_CHECK(fits, "the block mask of block_lists has shape ", blocks.sizes(),
              ", expected (batch or 1, heads or 1, query blocks, key blocks) with ", in.batch(), " batch entries, ",
              in.num_heads_q(), " heads, and blocks of 64 or 128 of ", longest.queries, " queries and ", longest.keys,
              " keys");
}

void check_accumulate_type(const char* name, const at::Tensor& tensor, const AttentionInputs& in) {
  check_dense(name, tensor);
  check_device(name, tensor, in.q);
  const at::ScalarType expected = in.accumulate_type();
  TORCH_CHECK(tensor.scalar_type() == expected, name, " has dtype ", dtype_name(tensor.scalar_type()), ", expected ",
              dtype_name(expected), " for q of dtype ", dtype_name(in.q.scalar_type()), "; cast with ", name,
              expected == at::kDouble ? ".double()" : ".float()");
}

void check_window(const char* name, const std::optional<int64_t>& width) {
  TORCH_CHECK_VALUE(!width || *width >= 0, name, " is ", width.value_or(0),
                    ", expected 0 or more keys, or None for no bound");
}

// The number as kernels compute with it.
double in_accumulate_type(const AttentionInputs& in, double number) {
  return in.accumulate_type() == at::kDouble ? number : double{static_cast<float>(number)};
}

at::DimVector expected_out_sizes(const AttentionInputs& in) {
  at::DimVector sizes(in.q.sizes());
  sizes.back() = in.head_dim_v();
  return sizes;
}

void check_shape(const char* name, const at::Tensor& tensor, at::IntArrayRef expected, const char* what) {
  TORCH_CHECK(tensor.sizes() == expected, name, " has shape ", tensor.sizes(), ", expected ", expected, " (", what,
              "); pass what the forward pass returned");
}

// The LSE's residual has the shape of the LSE, or is absent or empty.
void check_lse_residual(const std::optional<at::Tensor>& residual, const at::Tensor& lse) {
  if (!residual || residual->sizes() == at::IntArrayRef{0}) return;
  check_shape("lse_residual", *residual, lse.sizes(), "that of lse");
  check_device("lse_residual", *residual, lse);
  TORCH_CHECK(residual->scalar_type() == lse.scalar_type(), "lse_residual has dtype ",
              dtype_name(residual->scalar_type()), ", expected ", dtype_name(lse.scalar_type()));
}

template <class Inputs>
void check_fields_in_memory(const Inputs& in) {
  visit_fields(in, [](const char* name, const auto& field) {
    if constexpr (requires { check_holds_memory(name, field); }) check_holds_memory(name, field);
  });
}

bool is_present(const at::Tensor&) { return true; }
bool is_present(const std::optional<at::Tensor>& tensor) { return tensor.has_value(); }

// Gradients may be asked only of inputs that were given.
void check_output_mask(const AttentionInputs& in, const BackwardInputs& backward) {
  auto wanted = backward.output_mask.begin();
  const auto check = [&](const char* name, bool present) {
    TORCH_CHECK(present || !*wanted, "output_mask asks for the gradient of ", name, ", which was not given");
    ++wanted;
  };
  std::apply([&](const auto&... field) { (check(field.name, is_present(in.*field.member)), ...); }, kDifferentiable);
}

}  // namespace

void check_head_counts(const AttentionInputs& in, const char* k_name) {
  const int64_t heads_q = in.num_heads_q(), heads_k = in.num_heads_k();
  TORCH_CHECK(heads_k > 0 ? heads_q % heads_k == 0 : heads_q == 0, "q has ", heads_q, " heads and ", k_name, " has ",
              heads_k, "; q's number of heads must be a multiple of that (query head h reads key head h // (Hq / Hk))",
              hint_at_layout(in));
}

bool broadcasts_to_scores(const at::Tensor& table, const AttentionInputs& in, const SequenceLengths& longest) {
  const std::array<int64_t, 4> full = sizes_of_scores(in, longest);
  bool matches = table.dim() == 4;
  for (int64_t d = 0; matches && d < 4; ++d) matches = table.size(d) == 1 || table.size(d) == full[d];
  return matches;
}

void check_visibility(const std::optional<std::string>& causal, const std::optional<int64_t>& window_left,
                      const std::optional<int64_t>& window_right) {
  TORCH_CHECK_VALUE(!causal || *causal == "top_left" || *causal == "bottom_right", "causal is '", causal.value_or(""),
                    "', expected 'top_left', 'bottom_right' or None");
  check_window("window_left", window_left);
  check_window("window_right", window_right);
}

void check_dropout_probability(double dropout_p) {
  TORCH_CHECK_VALUE(dropout_p >= 0.0 && dropout_p <= 1.0, "dropout_p is ", dropout_p, ", expected 0 <= dropout_p <= 1");
}

void check_rng_seed(const at::Tensor& rng_seed, at::Device device) {
  TORCH_CHECK(rng_seed.scalar_type() == at::kLong && rng_seed.dim() == 1 && rng_seed.size(0) == 1,
              "rng_seed has dtype ", dtype_name(rng_seed.scalar_type()), " and shape ", rng_seed.sizes(),
              ", expected int64 and (1,); make it with torch.tensor([seed])");
  TORCH_CHECK(rng_seed.device() == device, "rng_seed is on ", rng_seed.device(), ", but q is on ", device,
              "; draw it on q's device");
}

void check_score_tensors(const AttentionInputs& in, const SequenceLengths& longest) {
  TORCH_CHECK(!in.bias_is_relative || in.bias, "bias_is_relative is set, but there is no bias; pass one");
  if (in.bias) {
    const at::ScalarType dtype = in.bias->scalar_type();
    TORCH_CHECK(dtype == in.q.scalar_type() || dtype == at::kFloat, "bias has dtype ", dtype_name(dtype),
                ", expected q's dtype (", dtype_name(in.q.scalar_type()), ") or float32", hint_at_mask(dtype));
    if (in.bias_is_relative) {
      check_relative_bias(*in.bias, in, longest);
    } else {
      check_broadcastable("bias", *in.bias, in, longest);
    }
  }
  if (in.mask) {
    const at::ScalarType dtype = in.mask->scalar_type();
    TORCH_CHECK(dtype == at::kBool, "mask has dtype ", dtype_name(dtype), ", expected bool (True = attend)",
                hint_at_bias(dtype));
    check_broadcastable("mask", *in.mask, in, longest);
  }
  if (in.intervals) check_intervals(*in.intervals, in, longest);
  if (in.blocks) check_blocks(*in.blocks, in, longest);
  if (in.alibi_slopes) {
    const at::Tensor& slopes = *in.alibi_slopes;
    check_accumulate_type("alibi_slopes", slopes, in);
    const bool matches = (slopes.dim() == 1 && slopes.size(0) == in.num_heads_q()) ||
                         (slopes.dim() == 2 && slopes.size(0) == in.batch() && slopes.size(1) == in.num_heads_q());
    TORCH_CHECK(matches, "alibi_slopes has shape ", slopes.sizes(), ", expected (", in.num_heads_q(), ",) or (",
                in.batch(), ", ", in.num_heads_q(), "): a slope for each query head, or batch entry and query head",
                hint_at_layout(in, slopes));
  }
  if (in.sink) {
    check_accumulate_type("sink", *in.sink, in);
    TORCH_CHECK(in.sink->dim() == 1 && in.sink->size(0) == in.num_heads_q(), "sink has shape ", in.sink->sizes(),
                ", expected (", in.num_heads_q(), ",): a logit for each query head", hint_at_layout(in, *in.sink));
  }
}

void check_options(const AttentionInputs& in) {
  const double scale = in.scale.value_or(1.0), softcap = in.softcap.value_or(1.0);
  TORCH_CHECK_VALUE(std::isfinite(in_accumulate_type(in, scale)), "scale is ", scale, ", expected a finite number of ",
                    dtype_name(in.accumulate_type()), ", or None for 1 / sqrt(head dim)");
  TORCH_CHECK_VALUE(softcap > 0.0 && std::isnormal(in_accumulate_type(in, softcap)), "softcap is ", softcap,
                    ", expected a finite number above 0 of ", dtype_name(in.accumulate_type()), ", or None for no cap");
  check_visibility(in.causal, in.window_left, in.window_right);
  check_dropout_probability(in.dropout_p);
  TORCH_CHECK_VALUE(in.dropout_p < 1.0,
                    "dropout_p is 1, which drops every weight; flash_attn_ext.attention needs no kernel for that, and "
                    "here less than 1 is expected");
  TORCH_CHECK(in.dropout_p == 0.0 || in.rng_seed.has_value(), "dropout_p is ", in.dropout_p,
              " but there is no rng_seed; pass an int64 tensor of shape (1,)");
  TORCH_CHECK(in.dropout_p > 0.0 || !in.rng_seed.has_value(),
              "there is an rng_seed but dropout_p is 0; pass None, or the dropout probability");
  if (in.rng_seed) check_rng_seed(*in.rng_seed, in.q.device());
}

void check_in_memory(const AttentionInputs& in) { check_fields_in_memory(in); }
void check_in_memory(const KvCacheInputs& cache) { check_fields_in_memory(cache); }

void check_inputs(const AttentionInputs& in) {
  check_sequence_offsets(in);
  check_qkv(in);
  check_packed(in);
  check_lengths(in);
  check_score_tensors(in, longest_sequences(in));
  check_options(in);
}

void check_backward_inputs(const AttentionInputs& in, const BackwardInputs& backward) {
  check_dtype_and_device("dout", backward.dout, in.q);
  check_dtype_and_device("out", backward.out, in.q);
  check_shape("out", backward.out, expected_out_sizes(in), "q's, with v's head dim");
  check_shape("lse", backward.lse, in.lse_sizes(), "a value for each query head and query");
  check_device("lse", backward.lse, in.q);
  TORCH_CHECK(backward.dout.sizes() == backward.out.sizes(), "dout has shape ", backward.dout.sizes(),
              ", expected that of out, ", backward.out.sizes());
  TORCH_CHECK(backward.lse.scalar_type() == in.accumulate_type(), "lse has dtype ",
              dtype_name(backward.lse.scalar_type()), ", expected ", dtype_name(in.accumulate_type()));
  check_lse_residual(backward.lse_residual, backward.lse);
  TORCH_CHECK(!backward.dlse || backward.dlse->sizes() == backward.lse.sizes(), "dlse has shape ",
              backward.dlse ? backward.dlse->sizes() : at::IntArrayRef(), ", expected that of lse, ",
              backward.lse.sizes());
  if (backward.dlse) check_device("dlse", *backward.dlse, in.q);
  check_output_mask(in, backward);
}

void check_delta_inputs(const at::Tensor& out, const at::Tensor& dout, const std::optional<at::Tensor>& dlse) {
  TORCH_CHECK(out.dim() == 3 || out.dim() == 4, "out has shape ", out.sizes(),
              ", expected (batch, heads, sequence, head dim) or (total tokens, heads, head dim)");
  check_element_type("out", out, "out and dout");
  check_dtype_and_device("dout", dout, out);
  TORCH_CHECK(dout.sizes() == out.sizes(), "dout has shape ", dout.sizes(), ", expected that of out, ", out.sizes());
  if (!dlse) return;
  check_device("dlse", *dlse, out);
  const std::vector<int64_t> rows = out.dim() == 4 ? std::vector<int64_t>{out.size(0), out.size(1), out.size(2)}
                                                   : std::vector<int64_t>{out.size(1), out.size(0)};
  TORCH_CHECK(dlse->sizes() == at::IntArrayRef(rows), "dlse has shape ", dlse->sizes(), ", expected ",
              at::IntArrayRef(rows));
}

}  // namespace flash_attn_ext::host
