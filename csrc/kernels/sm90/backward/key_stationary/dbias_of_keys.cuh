// The gradient of a key bias: sums of dS over the queries of a work tile. A thread adds up those of its own two keys
// and a quarter of the queries, in shared memory, because at head dim 128 no register is left. No other thread reads
// them.
#pragma once

#include "kernels/sm90/backward/key_stationary/traits.h"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct DbiasOfKeys {
  static constexpr int kRows = Traits::Scores::kThreadRows;
  // What dS was multiplied by.
  static constexpr float kUnshift = Traits::kKeepsShift ? 1.0f / (1 << weight_shift(Traits::kConfig)) : 1.0f;

  KeyStationaryShared<Traits>& shared;

  __device__ __forceinline__ void clear() const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) at(r) = 0.0f;
  }
  __device__ __forceinline__ void add(const float (&sums)[kRows]) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) at(r) += sums[r];
  }

  // Stores the sums of a warp's 16 keys (common/sums/dbias_from_keys.cu). Four lanes share a key.
  __device__ __forceinline__ void store(float* to) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float sum = tile::quad_sum(at(r)) * kUnshift;
      if (tile::lane() % 4 == 0) to[Traits::Scores::row(r)] = sum;
    }
  }

 private:
  __device__ __forceinline__ float& at(int r) const {
    constexpr int kFirstWarp = tile::kWarpgroupSize / tile::kWarpSize;  // those before are producers
    return shared.dbias_of_keys[tile::warp() - kFirstWarp][r][tile::lane()];
  }
};

}  // namespace flash_attn_ext::sm90
