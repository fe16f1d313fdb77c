// The parameters of a kernel, as plain data. Host code fills every field by name; kernels of every backend read it.
#pragma once

#include <cstdint>

#include "attention/dropout.h"
#include "attention/host_device.h"
#include "attention/kv_address.h"
#include "attention/score_mod.h"
#include "attention/sequence.h"
#include "attention/visibility.h"

namespace flash_attn_ext::attention {

// A (batch, heads, rows, columns) tensor. In a packed batch batch_stride is 0 and rows count over all sequences.
struct MatrixView {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
  int64_t column_stride = 0;

  template <class Element>
  FLASH_HOST_DEVICE Element* row(int64_t batch, int64_t head, int64_t row) const {
    return static_cast<Element*>(data) + batch * batch_stride + head * head_stride + row * row_stride;
  }
};

// One accumulate-type value per (batch, head, query): lse, its residual, delta. Queries are contiguous.
struct StatisticView {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;

  FLASH_HOST_DEVICE bool present() const { return data != nullptr; }
  template <class Real>
  FLASH_HOST_DEVICE Real* at(int64_t batch, int64_t head, int64_t query) const {
    return static_cast<Real*>(data) + batch * batch_stride + head * head_stride + query;
  }
};

// The dimensions along which the mask, the intervals or the blocks differ.
struct MaskDimensions {
  bool batch;
  bool heads;
  bool queries;
  bool keys;
};

struct AttentionParams {
  ElementType element = ElementType::kFloat32;  // of q, k, v, out and their gradients
  bool allow_tf32 = false;                      // products of float32 may be rounded to TF32
  int64_t batch = 0;
  int64_t num_heads_q = 0;
  int64_t num_heads_k = 0;
  int64_t head_dim_qk = 0;
  int64_t head_dim_v = 0;

  SequenceTable sequences;
  Visibility visibility;
  ScoreMod score_mod;
  Dropout dropout;
  const void* sink = nullptr;  // (num_heads_q,) accumulate type, or null
  KvCache cache;

  MatrixView q;  // (batch, num_heads_q, queries, head_dim_qk)
  MatrixView k;  // (batch, num_heads_k, keys, head_dim_qk), or a cache: (entries, num_heads_k, rows, head_dim_qk)
  MatrixView v;  // the same, with head_dim_v

  // A GPU divides 32-bit numbers much faster than 64-bit ones.
  FLASH_HOST_DEVICE int64_t queries_per_key_head() const {
    return static_cast<uint32_t>(num_heads_q) / static_cast<uint32_t>(num_heads_k);
  }

  FLASH_HOST_DEVICE MaskDimensions mask_dimensions() const {
    const BroadcastView& mask = score_mod.mask;
    const RowIntervals& intervals = score_mod.intervals;
    const BlockMask& blocks = score_mod.blocks;
    const bool of_sequences = intervals.present() && sequences.cu_seqlens_q != nullptr;
    return {.batch = mask.batch_stride != 0 || intervals.batch_stride != 0 || blocks.batch_stride != 0 || of_sequences,
            .heads = mask.head_stride != 0 || intervals.head_stride != 0 || blocks.head_stride != 0,
            .queries = mask.query_stride != 0 || score_mod.selects_keys(),
            .keys = mask.key_stride != 0 || score_mod.selects_keys()};
  }

  // sequences.at(batch), but with as many keys as the cache holds if there is one; max_seqlen_k is then its capacity.
  FLASH_HOST_DEVICE Sequence sequence_of(int64_t batch_entry) const {
    Sequence sequence = sequences.at(batch_entry);
    if (cache.present()) sequence.num_keys = cache.num_keys(batch_entry, sequences.max_seqlen_k);
    return sequence;
  }
  FLASH_HOST_DEVICE KeyRow key_row(const Sequence& sequence, int64_t key) const {
    return cache.present() ? cache.row(sequence.batch, key) : KeyRow{sequence.batch, sequence.key_begin + key};
  }
};

// Without row_max: kernels that never write it take these, so that it costs them no registers or instructions.
struct BasicForwardParams : AttentionParams {
  MatrixView out;              // (batch, num_heads_q, queries, head_dim_v)
  StatisticView lse;           // written
  StatisticView lse_residual;  // written where present
};

struct ForwardParams : BasicForwardParams {
  // Written where present: the largest score of each row, without the sink; NaN where the LSE is.
  StatisticView row_max;
};

// The gradient of a bias in the bias's own shape, contiguous. A broadcast dimension has extent 1, and its gradients are
// summed in a fixed order.
struct BiasGradient {
  bool wanted = false;  // set before data is allocated, because the plan decides the type of data
  void* data = nullptr;
  ElementType element = ElementType::kFloat32;  // of data: the accumulate type where it starts at zero, else the bias's
  bool starts_at_zero = true;                   // kernels may add to it; else they write each element once
  bool per_batch = false;
  bool per_head = false;
  bool per_query = false;
  bool per_key = false;
  int64_t batch_stride = 0;  // 0 where broadcast, as in BroadcastView
  int64_t head_stride = 0;
  int64_t query_stride = 0;
  int64_t key_stride = 0;

  FLASH_HOST_DEVICE bool present() const { return wanted; }
};

struct BackwardParams : AttentionParams {
  MatrixView out;
  MatrixView dout;
  StatisticView lse;
  StatisticView lse_residual;  // read where present
  StatisticView dlse;          // read where present
  StatisticView delta;         // written by the pass itself: rowsum(dout * out) - dlse, or a more precise form of it
  MatrixView dq;               // each gradient is written where its data is not null
  MatrixView dk;
  MatrixView dv;
  BiasGradient dbias;
  void* dalibi_slopes = nullptr;  // (batch, num_heads_q) contiguous, accumulate type
  void* dsink = nullptr;          // (num_heads_q,) accumulate type
};

// Forward mode. A tangent whose data is null is a matrix of zeros.
struct TangentParams : AttentionParams {
  MatrixView q_tangent;
  MatrixView k_tangent;
  MatrixView v_tangent;
  const void* sink_tangent = nullptr;  // as sink, or null
  MatrixView out;
  StatisticView lse;
  MatrixView out_tangent;     // written
  StatisticView lse_tangent;  // written
};

// delta = rowsum(dout * out) - dlse (Dao 2023, "FlashAttention-2", algorithm 2 line 4; dlse makes the LSE an output).
struct DeltaParams {
  ElementType element = ElementType::kFloat32;
  int64_t batch = 0;
  int64_t num_heads = 0;
  int64_t rows = 0;
  int64_t head_dim = 0;
  MatrixView out;
  MatrixView dout;
  StatisticView dlse;  // read where present
  StatisticView delta;
};

inline DeltaParams delta_params(const BackwardParams& p) {
  const bool packed = p.sequences.cu_seqlens_q != nullptr;
  return {.element = p.element,
          .batch = packed ? 1 : p.batch,
          .num_heads = p.num_heads_q,
          .rows = packed ? p.sequences.total_q : p.sequences.max_seqlen_q,
          .head_dim = p.head_dim_v,
          .out = p.out,
          .dout = p.dout,
          .dlse = p.dlse,
          .delta = p.delta};
}

}  // namespace flash_attn_ext::attention
