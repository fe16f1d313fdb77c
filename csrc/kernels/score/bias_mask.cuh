// The bias and mask of one warp's tile of scores, staged in shared memory.
//
// A thread's elements of a score tile are pairs in rows 8 apart. Read from global memory, each pair would be half a
// sector and each load would touch eight cache lines, which takes as long as the GEMMs of the tile. So a backend copies
// the tile to shared memory, in the layout of global memory, while the GEMMs run. The rows of the scores may be queries
// or keys.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "kernels/score/score_tile.cuh"
#include "ptx/ldmatrix.h"
#include "ptx/math.h"
#include "ptx/shared_memory.h"

namespace flash_attn_ext {

// Elements of 1, 2 or 4 bytes. Rows of 64 bytes or more are padded by 16 bytes, so that the rows of one load lie in
// different banks.
template <class ElementType, class Tile>
struct StagedTile {
  using Element = ElementType;
  using Acc = typename Tile::Accumulator;
  static constexpr int kBytes = sizeof(Element);
  static constexpr int kRowBytes = Tile::kKeys * kBytes + (Tile::kKeys * kBytes < 64 ? 0 : 16);

  alignas(16) unsigned char data[Tile::kQueries * kRowBytes];

  __device__ __forceinline__ uint32_t address(int query, int key) const {
    return ptx::shared_address(data) + query * kRowBytes + key * kBytes;
  }

  // Calls function(r, j, low, high) with the bits of each of the thread's pairs.
  template <class Function>
  __device__ __forceinline__ void for_each_pair(Function&& function) const {
    if constexpr (!Tile::kRowsAreQueries && kBytes == 2) {
      for_each_transposed_pair(function);
    } else {
      const uint32_t own =
          Tile::kRowsAreQueries ? address(Acc::row(0), Acc::column(0, 0)) : address(Acc::column(0, 0), Acc::row(0));
#pragma unroll
      for (int r = 0; r < Acc::kThreadRows; ++r) {
#pragma unroll
        for (int j = 0; j < Acc::kColumnTiles; ++j) {
          const int query = Tile::kRowsAreQueries ? Acc::row_step(r) : 8 * j;
          const int key = Tile::kRowsAreQueries ? 8 * j : Acc::row_step(r);
          call_with_pair(function, r, j, own + query * kRowBytes + key * kBytes);
        }
      }
    }
  }

 private:
  template <class Function>
  __device__ __forceinline__ static void call_with_pair(Function&& function, int r, int j, uint32_t address) {
    if constexpr (kBytes == 4) {
      static_assert(Tile::kRowsAreQueries);
      function(r, j, ptx::load_shared(address), ptx::load_shared(address + kBytes));
    } else if constexpr (kBytes == 2) {
      const uint32_t pair = ptx::load_shared(address);
      function(r, j, pair & 0xFFFFu, pair >> 16);
    } else if constexpr (Tile::kRowsAreQueries) {
      const uint32_t pair = ptx::load_shared_u16(address);
      function(r, j, pair & 0xFFu, pair >> 8);
    } else {
      function(r, j, ptx::load_shared_u8(address), ptx::load_shared_u8(address + kRowBytes));
    }
  }

  // Matrices of 8 queries x 8 keys, which ldmatrix transposes for threads whose rows are keys.
  template <class Function>
  __device__ __forceinline__ void for_each_transposed_pair(Function&& function) const {
    static_assert(Acc::kColumnTiles % 2 == 0);
    const int matrix = tile::lane() / 8;
    const uint32_t own = address(matrix / 2 * 8 + tile::lane() % 8, matrix % 2 * 8);
#pragma unroll
    for (int i = 0; i < Acc::kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < Acc::kColumnTiles; j += 2) {
        uint32_t pairs[4];
        ptx::load_matrix_x4_transposed(pairs, own + 8 * j * kRowBytes + 16 * i * kBytes);
#pragma unroll
        for (int n = 0; n < 4; ++n) function(2 * i + n % 2, j + n / 2, pairs[n] & 0xFFFFu, pairs[n] >> 16);
      }
    }
  }
};

// Calls function(r, j, low, high) with each of the thread's pairs of a bias, read directly from global memory. Elements
// that do not exist are 0; they are masked by position.
template <class Element, class Tile, class Function>
__device__ __forceinline__ void for_each_bias_in_memory(const Tile& where, Function&& function) {
  using Acc = typename Tile::Accumulator;
  struct alignas(2 * sizeof(Element)) Pair {
    Element elements[2];
  };
  const attention::BroadcastView& view = where.p.score_mod.bias;
  const int64_t row_stride = Tile::kRowsAreQueries ? view.query_stride : view.key_stride;
  const int64_t column_stride = Tile::kRowsAreQueries ? view.key_stride : view.query_stride;
  const Element* first = static_cast<const Element*>(view.data) + view.offset(where.first()) +
                         Acc::row(0) * row_stride + Acc::column(0, 0) * column_stride;
  const auto for_each_pair = [&](auto&& load) {
#pragma unroll
    for (int r = 0; r < Acc::kThreadRows; ++r) {
#pragma unroll
      for (int j = 0; j < Acc::kColumnTiles; ++j) {
        const Pair pair = load(r, j, first + Acc::row_step(r) * row_stride);
        function(r, j, static_cast<float>(pair.elements[0]), static_cast<float>(pair.elements[1]));
      }
    }
  };
  const bool whole = where.num_queries() == Tile::kQueries && where.num_keys() == Tile::kKeys;
  if (whole && column_stride == 1 && row_stride % 2 == 0 && reinterpret_cast<uintptr_t>(first) % sizeof(Pair) == 0) {
    for_each_pair([&](int, int j, const Element* row) { return reinterpret_cast<const Pair*>(row)[4 * j]; });
    return;
  }
  const int rows = (Tile::kRowsAreQueries ? where.num_queries() : where.num_keys()) - Acc::row(0);
  const int columns = (Tile::kRowsAreQueries ? where.num_keys() : where.num_queries()) - Acc::column(0, 0);
  for_each_pair([&](int r, int j, const Element* row) {
    Pair pair = {};
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int64_t offset = Acc::column_step(j, e) * column_stride;
      if (Acc::row_step(r) < rows && Acc::column_step(j, e) < columns) pair.elements[e] = row[offset];
    }
    return pair;
  });
}

// Stands for both in kernels without a bias and a mask.
struct NoBiasMask {
  __device__ __forceinline__ void await() const {}
  template <bool kAny, class Tile, class Function>
  __device__ __forceinline__ void for_each_bias(const Tile&, Function&&) const {}
  template <class Function>
  __device__ __forceinline__ void for_each_masked(Function&&) const {}
};

// A warp's tile of the bias and of the mask. Where there is room for a bias (kHasBias), its type is Element. A float32
// bias of 16-bit elements is read directly from global memory, and so is any bias where there is no room.
template <class Element, class Tile, bool kHasBias>
struct StagedBiasMask {
  using Bits = std::conditional_t<sizeof(Element) == 2, uint16_t, float>;

  [[no_unique_address]] std::conditional_t<kHasBias, StagedTile<Bits, Tile>, NoBiasMask> bias;
  StagedTile<uint8_t, Tile> mask;

  __device__ __forceinline__ static bool stages(const attention::BroadcastView& bias) {
    return kHasBias && bias.present() && (sizeof(Element) == 4 || bias.element != attention::ElementType::kFloat32);
  }

  // Calls function(r, j, low, high) with each of the thread's pairs of a bias that is present. kAny: the bias may be
  // one that is not staged.
  template <bool kAny, class Function>
  __device__ __forceinline__ void for_each_bias(const Tile& where, Function&& function) const {
    const attention::BroadcastView& view = where.p.score_mod.bias;
    if constexpr (kHasBias) {
      if (!kAny || stages(view)) {
        bias.for_each_pair([&](int r, int j, uint32_t low, uint32_t high) { function(r, j, value(low), value(high)); });
        return;
      }
    }
    if constexpr (kAny && sizeof(Element) == 2 && !kHasBias) {
      if (view.element != attention::ElementType::kFloat32) {
        for_each_bias_in_memory<Element>(where, function);
        return;
      }
    }
    if constexpr (kAny && !(kHasBias && sizeof(Element) == 4)) for_each_bias_in_memory<float>(where, function);
  }

  // Calls function(r, j, e) for each of the thread's elements that the mask hides.
  template <class Function>
  __device__ __forceinline__ void for_each_masked(Function&& function) const {
    mask.for_each_pair([&](int r, int j, uint32_t low, uint32_t high) {
      if (low == 0) function(r, j, 0);
      if (high == 0) function(r, j, 1);
    });
  }

 private:
  __device__ __forceinline__ static float value(uint32_t bits) {
    if constexpr (sizeof(Element) == 2) {
      return ptx::to_float(static_cast<uint16_t>(bits), Element{});
    } else {
      return __uint_as_float(bits);
    }
  }
};

}  // namespace flash_attn_ext
