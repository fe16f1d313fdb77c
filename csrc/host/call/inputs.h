// One attention call as it arrives from Python, in canonical form:
//   dense   q (B, Hq, Sq, D), k (B, Hk, Sk, D), v (B, Hk, Sk, Dv)
//   packed  q (Tq, Hq, D), k (Tk, Hk, D), v (Tk, Hk, Dv) with cu_seqlens_q and cu_seqlens_k (batch + 1,)
#pragma once

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace flash_attn_ext::host {

struct AttentionInputs {
  at::Tensor q;
  at::Tensor k;
  at::Tensor v;
  std::optional<at::Tensor> bias;          // (B|1, Hq|1, Sq|1, Sk|1), q's dtype or the accumulate type
  std::optional<at::Tensor> mask;          // the same shapes, bool, True = attend
  std::optional<at::Tensor> alibi_slopes;  // (Hq,) or (B, Hq), accumulate type
  std::optional<at::Tensor> sink;          // (Hq,), accumulate type
  // (B|1, Hq|1, Sq, 2 n) int32, packed (Hq|1, Tq, 2 n), n <= 4: the intervals of keys that a query sees
  std::optional<at::Tensor> intervals;
  // (B|1, Hq|1, query blocks, key blocks) bool, True = attend: blocks of 64 or 128 queries, and of 64 or 128 keys
  std::optional<at::Tensor> blocks;
  std::optional<at::Tensor> cu_seqlens_q;  // (B + 1,) int32
  std::optional<at::Tensor> cu_seqlens_k;
  std::optional<at::Tensor> rng_seed;  // (1,) int64
  std::optional<double> scale;         // 1 / sqrt(head dim) by default
  std::optional<double> softcap;
  std::optional<std::string> causal;
  std::optional<int64_t> window_left;
  std::optional<int64_t> window_right;
  double dropout_p = 0.0;
  std::optional<int64_t> max_seqlen_q;
  std::optional<int64_t> max_seqlen_k;
  std::optional<std::string> backend;
  bool allow_tf32 = false;      // for float32 on a GPU: one TF32 product instead of three
  bool sequence_first = false;  // the caller has (B, S, H, D), and out gets it where q's strides leave the order open
  bool wants_row_max = false;   // the forward pass also returns the largest score of each row
  // A relative-position bias, (1, Hq|1, 1, Sq + Sk - 1): a value per key - query, that of 1 - Sq first
  bool bias_is_relative = false;

  bool packed() const { return cu_seqlens_q.has_value(); }
  int64_t batch() const { return packed() ? cu_seqlens_q->size(0) - 1 : q.size(0); }
  int64_t num_heads_q() const { return q.size(1); }
  int64_t num_heads_k() const { return k.size(1); }
  // Whether there is any work for kernels to plan and do.
  bool has_heads() const { return batch() > 0 && num_heads_q() > 0; }
  int64_t head_dim_qk() const { return q.size(-1); }
  int64_t head_dim_v() const { return v.size(-1); }
  // With a head dim of 0 every score is 0, whatever the scale.
  double scale_factor() const {
    return scale.value_or(1.0 / std::sqrt(static_cast<double>(std::max<int64_t>(head_dim_qk(), 1))));
  }
  at::DimVector lse_sizes() const {
    if (packed()) return {q.size(1), q.size(0)};
    return {q.size(0), q.size(1), q.size(2)};
  }
  at::ScalarType accumulate_type() const { return q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }
};

// The results of the forward pass that the backward pass needs, and the incoming gradients.
struct BackwardInputs {
  at::Tensor dout;
  std::optional<at::Tensor> dlse;
  at::Tensor out;
  at::Tensor lse;
  std::optional<at::Tensor> lse_residual;  // absent, or of shape (0,), when there is no bias
  std::array<bool, 6> output_mask;         // dq, dk, dv, dbias, dalibi_slopes, dsink
};

struct ForwardOutputs {
  at::Tensor out;
  at::Tensor lse;
  at::Tensor lse_residual;  // undefined when there is no bias
  at::Tensor row_max;       // in the shape of lse; undefined when the call does not want it
};

}  // namespace flash_attn_ext::host
