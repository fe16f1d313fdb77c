// What a kernel is told, as plain data. Host code fills every field by name; kernels of every backend read it.
#pragma once

#include <cstdint>

#include "attention/dropout.h"
#include "attention/host_device.h"
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

  MatrixView q;  // (batch, num_heads_q, queries, head_dim_qk)
  MatrixView k;  // (batch, num_heads_k, keys, head_dim_qk)
  MatrixView v;  // (batch, num_heads_k, keys, head_dim_v)

  // 32 bits divide several times faster on a GPU.
  FLASH_HOST_DEVICE int64_t queries_per_key_head() const {
    return static_cast<uint32_t>(num_heads_q) / static_cast<uint32_t>(num_heads_k);
  }
};

struct ForwardParams : AttentionParams {
  MatrixView out;              // (batch, num_heads_q, queries, head_dim_v)
  StatisticView lse;           // written
  StatisticView lse_residual;  // written where present
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

// The gradient of a bias in the bias's own shape, contiguous. A broadcast dimension has extent 1, and its gradients are
// summed in a fixed order.
struct BiasGradient {
  void* data = nullptr;
  ElementType element = ElementType::kFloat32;  // of data: the accumulate type where it starts at zero, else the bias's
  bool starts_at_zero = true;                   // kernels may add to it; else they write each element, and once
  bool per_batch = false;
  bool per_head = false;
  bool per_query = false;
  bool per_key = false;
  int64_t batch_stride = 0;  // 0 where broadcast, as in BroadcastView
  int64_t head_stride = 0;
  int64_t query_stride = 0;
  int64_t key_stride = 0;
  bool present() const { return data != nullptr; }
};

// Matrices of scores (P or dS, in the element type) that one kernel of the backward pass leaves to another: one for
// each query head of the pairs at work. Rows are what the writer keeps stationary, columns what streams past it; both
// are padded to multiples of kPadding. In a packed batch a head's matrix has the rows of all sequences, one after the
// other. Only what is visible is written.
//
// Inside each group of 32 columns 16-bit elements lie in the order in which a thread of an accumulator holds them:
// column 8 j + 2 t + e (j, t < 4, e < 2) at place 8 t + 2 j + e, so that a thread writes 16 bytes at a time. 32-bit
// ones lie in order: the pairs of four threads make 32 bytes.
struct ScoreSpill {
  static constexpr int64_t kPadding = 128;
  static constexpr int64_t kMostBytes = int64_t{2} << 30;  // of all matrices; 32 bits count their elements

  void* p = nullptr;   // P as it multiplies dO; null where only dS is kept
  void* ds = nullptr;  // d loss / d (scale * q.k); null: nothing is kept
  bool rows_are_keys = false;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t first_key_head = 0;  // at work; a packed batch has all of a head's pairs at work
  int64_t max_bytes = 0;       // how much memory may be used for it

  FLASH_HOST_DEVICE bool present() const { return ds != nullptr; }
  FLASH_HOST_DEVICE static int64_t padded(int64_t length) { return (length + kPadding - 1) / kPadding * kPadding; }

  // Where a packed sequence's rows begin: far enough from those of the one before, wherever that ends.
  FLASH_HOST_DEVICE int64_t first_row(const Sequence& sequence) const {
    const int64_t begin = rows_are_keys ? sequence.key_begin : sequence.query_begin;
    return (begin / kPadding + sequence.batch) * kPadding;
  }
  static int64_t packed_rows(int64_t total, int64_t batch) { return padded(total) + batch * kPadding; }

  template <class Element>
  FLASH_HOST_DEVICE static int place(int column) {
    if (sizeof(Element) != 2) return column;
    return column / 32 * 32 + column % 8 / 2 * 8 + column % 32 / 8 * 2 + column % 2;
  }
};

struct BackwardParams : AttentionParams {
  MatrixView dout;
  StatisticView lse;
  StatisticView lse_residual;  // read where present
  StatisticView delta;         // a backend may replace it by a more precise one
  bool delta_is_left = false;  // delta is not there yet: the first kernel that needs it computes it from out
  MatrixView out;              // read where delta_is_left
  StatisticView dlse;          // read where present
  MatrixView dq;               // each gradient is written where its data is not null
  MatrixView dk;
  MatrixView dv;
  BiasGradient dbias;
  void* dalibi_slopes = nullptr;  // (batch, num_heads_q) contiguous, accumulate type
  void* dsink = nullptr;          // (num_heads_q,) accumulate type

  // A GPU's partial sums of dalibi_slopes, accumulate type: (batch, num_heads_q, alibi_partials_per_head), one for each
  // tile of queries.
  void* alibi_partials = nullptr;
  int64_t alibi_partials_per_head = 0;

  // The pairs of a batch entry and a key head that a launch works on, and the scores that it leaves or finds. Counted
  // head-major, key head * batch + batch entry, so that a launch may hold all batch entries of a head.
  int64_t first_pair = 0;
  int64_t num_pairs = 0;
  ScoreSpill spill;
};

}  // namespace flash_attn_ext::attention
