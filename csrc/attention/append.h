// What a call with a cache does before it attends: new keys and values go into the cache, and they and q are rotated.
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
  int64_t num_positions = 0;  // a position past the table is its last one
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

// Key i of k_new becomes key seqlens + i of the cache, where that is below the capacity; what is past it is dropped.
struct AppendParams {
  ElementType element = ElementType::kFloat32;
  int64_t batch = 0;
  int64_t num_heads_q = 0;
  int64_t num_heads_k = 0;
  int64_t head_dim_qk = 0;
  int64_t head_dim_v = 0;
  int64_t num_queries = 0;
  int64_t capacity = 0;  // keys that a sequence can have
  KvCache cache;         // num_new of them are appended
  Rotary rotary;
  MatrixView k;  // the cache, written
  MatrixView v;
  MatrixView k_new;  // (batch, num_heads_k, num_new, head_dim_qk), where num_new > 0
  MatrixView v_new;
  MatrixView q;
  MatrixView q_rotated;  // written where rotary.present(): (batch, num_heads_q, num_queries, head_dim_qk)

  FLASH_HOST_DEVICE bool present() const { return cache.num_new > 0; }
};

// A forward pass, and what goes into its cache before it, if anything does. q is the rotated one then.
struct AppendingForwardParams : ForwardParams {
  AppendParams append;
};

}  // namespace flash_attn_ext::attention
