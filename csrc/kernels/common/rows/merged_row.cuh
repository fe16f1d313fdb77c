// A row of O whose keys are split (split-KV): merges the splits in a fixed order, and then finishes the row.
#pragma once

#include <type_traits>

#include "attention/online_softmax.h"
#include "kernels/common/rows/attention_rows.cuh"

namespace flash_attn_ext::common {

// The memory of splits: rows of float32 and the softmax state of each row.
struct SplitRows {
  float* out;     // (slots, rows, columns): O before it is divided by l; rows begin at multiples of 16 bytes
  float2* state;  // (slots, rows): m and l
  int rows;       // of a slot
  int columns;

  __device__ __forceinline__ float* out_row(int slot, int row) const {
    return out + (int64_t{slot} * rows + row) * columns;
  }
  __device__ __forceinline__ float2& state_of(int slot, int row) const { return state[int64_t{slot} * rows + row]; }
};

// A row that is spread over a warp: a lane has contiguous columns, so that it loads and stores them as vectors.
template <int kColumns>
struct MergedRow {
  static constexpr int kSlots = kColumns / kWarpSize;
  static constexpr int kVector = kSlots < 4 ? kSlots : 4;
  using Vector = std::conditional_t<kVector == 4, float4, float2>;
  static_assert(kVector == 2 || kVector == 4);

  // A lane's columns of a row, while their loads are in flight.
  struct Columns {
    float values[kSlots];
  };

  attention::SoftmaxState<float> state;
  float out[kSlots] = {};

  __device__ __forceinline__ static int column(int slot) {
    return (slot / kVector * kWarpSize + tile::lane()) * kVector + slot % kVector;
  }

  __device__ __forceinline__ static Columns load(const float* row) {
    Columns columns;
#pragma unroll
    for (int slot = 0; slot < kSlots; slot += kVector) {
      *reinterpret_cast<Vector*>(columns.values + slot) = *reinterpret_cast<const Vector*>(row + column(slot));
    }
    return columns;
  }

  __device__ __forceinline__ void store_columns(float* row) const {
#pragma unroll
    for (int slot = 0; slot < kSlots; slot += kVector) {
      *reinterpret_cast<Vector*>(row + column(slot)) = *reinterpret_cast<const Vector*>(out + slot);
    }
  }

  __device__ __forceinline__ void add(const float2& split_state, const float* split) {
    const Columns columns = load(split);
    const attention::SoftmaxState<float> other = {.m = split_state.x, .l = split_state.y};
    const float factor = state.merge(other);
    const float others_factor = exp(other.m - state.shift());
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) out[slot] = out[slot] * factor + columns.values[slot] * others_factor;
  }

  // Adds a split whose softmax state is part of `state` already.
  __device__ __forceinline__ void add_weighted(const Columns& split, float weight) {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) out[slot] += weight * split.values[slot];
  }

  __device__ __forceinline__ void store(const SplitRows& splits, int slot, int row) const {
    store_columns(splits.out_row(slot, row));
    if (tile::lane() == 0) splits.state_of(slot, row) = {state.m, state.l};
  }
};

// Finishes a row whose splits are all merged: O / l and the LSE. first_column: the column of O that is the row's column
// 0. writes: whether to write them to memory. Returns whether the row has a NaN, which may be 0 times a NaN or infinity
// that it does not attend to; then it has to be recomputed without tensor cores.
template <class Element, int kColumns>
__device__ __forceinline__ bool finish_row(const attention::ForwardParams& p, const RowPlace& place,
                                           MergedRow<kColumns>& row, int first_column, bool writes = true) {
  const bool writes_statistics = writes && tile::lane() == 0 && first_column == 0;
  attention::SoftmaxState<float> state = row.state;
  if (writes_statistics && p.row_max.present()) *p.row_max.at<float>(place.batch, place.head, place.row) = state.m;
  float factor = p.sink == nullptr ? 1.0f : state.add_sink(static_cast<const float*>(p.sink)[place.head]);
  factor *= state.output_factor();
  if (p.dropout.enabled()) factor *= static_cast<float>(p.dropout.rescale);
  const int columns = static_cast<int>(p.head_dim_v) - first_column;
  Element* target = p.out.row<Element>(place.batch, place.head, place.row) + first_column * p.out.column_stride;
  bool has_nan = state.l != state.l;
#pragma unroll
  for (int slot = 0; slot < row.kSlots; ++slot) {
    const int column = row.column(slot);
    const float value = row.out[slot] * factor;
    if (!writes || column >= columns) continue;
    has_nan |= value != value;
    target[column * p.out.column_stride] = Element(value);
  }
  if (writes_statistics) {
    const attention::LogSumExp<float> lse = state.log_sum_exp();
    *p.lse.at<float>(place.batch, place.head, place.row) = lse.value;
    if (p.lse_residual.present()) *p.lse_residual.at<float>(place.batch, place.head, place.row) = lse.residual;
  }
  return __any_sync(kAllLanes, has_nan);
}

}  // namespace flash_attn_ext::common
