// The first step of a call with a cache: it appends new keys and values to the cache, and rotates the new keys and q.
#pragma once

#include <cstdint>

#include "attention/host_device.h"
#include "attention/params.h"

namespace flash_attn_ext::attention {

// Rotary position embedding (Su et al. 2021, "RoFormer", section 3.4.2) of the first `dim` columns of a row.
struct Rotary {
  const void* cos = nullptr;  // (positions, dim / 2) of q's element type; null: nothing is rotated
  const void* sin = nullptr;
  int64_t cos_stride = 0;  // from one position to the next
  int64_t sin_stride = 0;
  int64_t num_positions = 0;  // positions past the table use its last row
  int64_t dim = 0;
  bool interleaved = false;      // pairs are columns 2 i and 2 i + 1; else i and i + dim / 2
  bool queries_advance = false;  // query i is at the position of new key i; else all are at the first new key's

  FLASH_HOST_DEVICE bool present() const { return cos != nullptr; }
  FLASH_HOST_DEVICE int64_t row(int64_t position) const {
    return position < num_positions ? position : num_positions - 1;
  }
  FLASH_HOST_DEVICE int64_t first_column(int64_t pair) const { return interleaved ? 2 * pair : pair; }
  FLASH_HOST_DEVICE int64_t second_column(int64_t pair) const { return interleaved ? 2 * pair + 1 : pair + dim / 2; }
};

template <class Real>
struct RotatedPair {
  Real first;
  Real second;
};

template <class Real>
FLASH_HOST_DEVICE RotatedPair<Real> rotate(Real first, Real second, Real cos, Real sin) {
  return {first * cos - second * sin, first * sin + second * cos};
}

// Key i of k_new becomes key seqlens + i of the cache if that is below the capacity. Keys past it are dropped.
struct AppendParams {
  ElementType element = ElementType::kFloat32;
  int64_t batch = 0;
  int64_t num_heads_q = 0;
  int64_t num_heads_k = 0;
  int64_t head_dim_qk = 0;
  int64_t head_dim_v = 0;
  int64_t num_queries = 0;
  int64_t capacity = 0;  // the most keys that a sequence can have
  KvCache cache;         // num_new keys are appended to each sequence
  Rotary rotary;
  MatrixView k;  // the cache, written
  MatrixView v;
  MatrixView k_new;  // (batch, num_heads_k, num_new, head_dim_qk), where num_new > 0
  MatrixView v_new;
  MatrixView q;
  MatrixView q_rotated;  // written where rotary.present(): (batch, num_heads_q, num_queries, head_dim_qk)

  FLASH_HOST_DEVICE bool present() const { return cache.num_new > 0; }
};

// A forward pass, and the keys and values that are appended to its cache before it, if any. If q is rotated,
// ForwardParams has the rotated one.
struct AppendingForwardParams : ForwardParams {
  AppendParams append;
};

}  // namespace flash_attn_ext::attention
