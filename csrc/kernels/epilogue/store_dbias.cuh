// Sums tiles of dS, and writes the gradient of a bias in the type that its memory has (attention::BiasGradient):
// float32, or the 16-bit Element.
#pragma once

#include "attention/params.h"
#include "tile/accumulator.h"
#include "tile/element.h"

namespace flash_attn_ext {

template <class Element>
__device__ __forceinline__ void store_dbias(const attention::BiasGradient& g, int64_t offset, float value) {
  if (g.element == attention::ElementType::kFloat32) {
    float* target = static_cast<float*>(g.data) + offset;
    *target = g.starts_at_zero ? *target + value : value;
  } else if constexpr (sizeof(Element) == 2) {
    static_cast<Element*>(g.data)[offset] = Element(value);
  }
}

// Stores a pair of packed Elements of neighbouring keys, of which the first `count` exist.
template <class Element>
__device__ __forceinline__ void store_dbias_pair(const attention::BiasGradient& g, int64_t offset, uint32_t pair,
                                                 int count) {
  auto* const target = static_cast<Element*>(g.data) + offset;
  const bool is_word = g.element != attention::ElementType::kFloat32 && g.key_stride == 1 &&
                       reinterpret_cast<uintptr_t>(target) % sizeof(uint32_t) == 0;
  if (is_word && count >= 2) {
    *reinterpret_cast<uint32_t*>(target) = pair;
    return;
  }
  for (int i = 0; i < 2; ++i) {
    if (i < count)
      store_dbias<Element>(g, offset + i * g.key_stride,
                           ptx::to_float(static_cast<uint16_t>(pair >> 16 * i), Element{}));
  }
}

// Stores 8 neighbouring elements, the first of which is at a multiple of 16 bytes. The stores are marked evict-first in
// L2 (st.cs). nvcc would split a plain store of values that asm computes into four.
template <class Element>
__device__ __forceinline__ void store_dbias_chunk(const attention::BiasGradient& g, int64_t offset, float4 low,
                                                  float4 high) {
  if (g.element == attention::ElementType::kFloat32) {
    auto* target = reinterpret_cast<float4*>(static_cast<float*>(g.data) + offset);
    if (g.starts_at_zero) {
      const float4 old_low = target[0];
      const float4 old_high = target[1];
      low = {old_low.x + low.x, old_low.y + low.y, old_low.z + low.z, old_low.w + low.w};
      high = {old_high.x + high.x, old_high.y + high.y, old_high.z + high.z, old_high.w + high.w};
    }
    __stcs(target, low);
    __stcs(target + 1, high);
  } else {
    const uint4 packed = {ptx::pack(low.x, low.y, Element{}), ptx::pack(low.z, low.w, Element{}),
                          ptx::pack(high.x, high.y, Element{}), ptx::pack(high.z, high.w, Element{})};
    __stcs(reinterpret_cast<uint4*>(static_cast<Element*>(g.data) + offset), packed);
  }
}

// Stores a tile of sums. Called by all threads of a CTA, each of which has the same columns of several rows.
template <class Element>
struct DbiasTileStore {
  static constexpr int kTile = 64;  // queries, and keys
  static constexpr int kChunk = 8;  // elements in 16 bytes
  static constexpr int kThreads = 128;
  static constexpr int kRowsPerThread = kTile * kTile / (kThreads * kChunk);
  using Sums = float[kTile][kTile + 4];  // queries x keys

  const attention::BackwardParams& p;
  int64_t first_query;
  int64_t first_key;
  bool in_chunks;  // each row is a multiple of 16 bytes, or of 32 in float32

  __device__ __forceinline__ static int thread_row(int i) {
    return (tile::warp() / 2 + i * (kThreads / tile::kWarpSize / 2)) * 8 + tile::lane() / 4;
  }
  __device__ __forceinline__ static int thread_column() { return tile::warp() % 2 * 32 + tile::lane() % 4 * kChunk; }

  // offset: of the bias's matrix.
  __device__ __forceinline__ void store(int64_t offset, const Sums& sums) const {
    if (!in_chunks) {
      store_elements(offset, sums);
      return;
    }
    const attention::BiasGradient& g = p.dbias;
    const int num_queries = static_cast<int>(min(p.sequences.max_seqlen_q - first_query, int64_t{kTile}));
    if (first_key + thread_column() >= p.sequences.max_seqlen_k) return;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      if (thread_row(i) >= num_queries) continue;
      const auto* values = reinterpret_cast<const float4*>(&sums[thread_row(i)][thread_column()]);
      const int64_t row = offset + (first_query + thread_row(i)) * g.query_stride;
      store_dbias_chunk<Element>(g, row + first_key + thread_column(), values[0], values[1]);
    }
  }

 private:
  // Stores one element at a time. Neighbouring threads store neighbouring elements.
  __device__ __forceinline__ void store_elements(int64_t offset, const Sums& sums) const {
    const attention::BiasGradient& g = p.dbias;
    for (int index = static_cast<int>(threadIdx.x); index < kTile * kTile; index += kThreads) {
      const int64_t query = first_query + index / kTile;
      const int64_t key = first_key + index % kTile;
      if (query >= p.sequences.max_seqlen_q || key >= p.sequences.max_seqlen_k) continue;
      store_dbias<Element>(g, offset + query * g.query_stride + key * g.key_stride, sums[index / kTile][index % kTile]);
    }
  }
};

// The sums of a thread's chunks of dS, over the heads that share a tile of dBias.
template <class Element>
struct DbiasTileSums {
  using Store = DbiasTileStore<Element>;
  static constexpr int kHeadsInFlight = 2;
  using Chunks = uint4[Store::kRowsPerThread];

  float at[Store::kRowsPerThread][Store::kChunk];

  // Sums the chunks of heads.left heads, in a fixed order. load(chunks): loads those of the next head. What it does not
  // load stays 0.
  template <class Heads, class Load>
  __device__ __forceinline__ void sum(const Heads& heads, Load&& load) {
    for (auto& row : at) {
      for (float& sum : row) sum = 0.0f;
    }
    while (heads.left > 0) {
      Chunks chunks[kHeadsInFlight] = {};
#pragma unroll
      for (auto& of_head : chunks) {
        if (heads.left > 0) load(of_head);
      }
#pragma unroll
      for (const auto& of_head : chunks) add(of_head);
    }
  }

 private:
  __device__ __forceinline__ void add(const Chunks& chunks) {
#pragma unroll
    for (int i = 0; i < Store::kRowsPerThread; ++i) {
      const uint32_t words[] = {chunks[i].x, chunks[i].y, chunks[i].z, chunks[i].w};
#pragma unroll
      for (int e = 0; e < Store::kChunk; ++e) {
        at[i][e] += ptx::to_float(static_cast<uint16_t>(words[e / 2] >> (e % 2 * 16)), Element{});
      }
    }
  }
};

}  // namespace flash_attn_ext
