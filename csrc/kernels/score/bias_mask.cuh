// A bias and a mask on their way to one warp's scores, through shared memory.
//
// A thread's elements of a score tile are pairs in rows 8 apart. Read from global memory, each pair would be half a
// sector and each load eight cache lines, which takes as long as the tile's products. So the warp copies its own rows
// 16 bytes at a time while it multiplies, and reads the pairs from shared memory. Rows are 16 bytes longer there, so
// that those of one load lie in different banks.
#pragma once

#include "kernels/score/score_tile.cuh"
#include "ptx/cp_async.h"
#include "ptx/shared_memory.h"

namespace flash_attn_ext {

template <class Element, int kRows, int kColumns>
struct StagedRows {
  static constexpr int kRowBytes = kColumns * sizeof(Element) + 16;

  alignas(16) unsigned char data[kRows * kRowBytes];

  __device__ __forceinline__ uint32_t address(int row, int column) const {
    return ptx::shared_address(data) + row * kRowBytes + column * static_cast<int>(sizeof(Element));
  }

  // Starts copying the first `rows` rows and `columns` columns of a view's tile that begins at origin; the rest is
  // zeros.
  __device__ __forceinline__ void copy_async(const Element* origin, const attention::BroadcastView& view, int rows,
                                             int columns) {
    constexpr int kChunk = 16 / sizeof(Element);
    constexpr int kChunks = kColumns / kChunk;
    // Whole chunks alone: nothing is known of what lies behind the last element, and compute-sanitizer counts 16 bytes.
    const bool in_chunks = view.key_stride == 1 && (view.query_stride | columns) % kChunk == 0 &&
                           reinterpret_cast<uintptr_t>(origin) % 16 == 0;
    if (in_chunks) {
      constexpr int kRowStep = tile::kWarpSize / kChunks;
      const int first_row = tile::lane() / kChunks;
      if (kRowStep > kRows && first_row >= kRows) return;
      const int column = tile::lane() % kChunks * kChunk;
      const Element* source = origin + first_row * view.query_stride + column;
      const uint32_t target = address(first_row, column);
#pragma unroll
      for (int row = 0; row < kRows; row += kRowStep) {
        ptx::copy_async_16(target + row * kRowBytes, source, first_row + row < rows && column < columns ? 16 : 0);
        source += kRowStep * view.query_stride;
      }
      return;
    }
#pragma unroll 1
    for (int index = tile::lane(); index < kRows * kColumns; index += tile::kWarpSize) {
      const int row = index / kColumns;
      const int column = index % kColumns;
      const bool exists = row < rows && column < columns;
      *reinterpret_cast<Element*>(data + row * kRowBytes + column * sizeof(Element)) =
          exists ? origin[row * view.query_stride + column * view.key_stride] : Element{};
    }
  }
};

// A warp's rows of both.
template <class Element, class Scores>
struct StagedBiasMask {
  using Bits = std::conditional_t<sizeof(Element) == 2, uint16_t, float>;  // of a bias in the element type
  static constexpr int kRows = 16 * Scores::kRowTiles;
  static constexpr int kColumns = 8 * Scores::kColumnTiles;

  StagedRows<Bits, kRows, kColumns> bias;
  StagedRows<uint8_t, kRows, kColumns> mask;

  // A float32 bias beside 16-bit elements is added straight from memory.
  __device__ __forceinline__ static bool stages(const attention::BroadcastView& bias) {
    return bias.present() && (sizeof(Element) == 4 || bias.element != attention::ElementType::kFloat32);
  }

  // The warp is done with what was here before.
  template <class Tile>
  __device__ __forceinline__ void load(const Tile& where, bool with_mask) {
    const attention::ScoreMod& mod = where.p.score_mod;
    if (stages(mod.bias)) copy(bias, mod.bias, where);
    if (with_mask) copy(mask, mod.mask, where);
  }

  // Calls function(r, j, low, high) with the thread's pairs of the bias.
  template <class Function>
  __device__ __forceinline__ void for_each_bias(Function&& function) const {
    const uint32_t own = bias.address(Scores::row(0), Scores::column(0, 0));
#pragma unroll
    for (int r = 0; r < Scores::kThreadRows; ++r) {
#pragma unroll
      for (int j = 0; j < Scores::kColumnTiles; ++j) {
        const uint32_t address = own + Scores::row_step(r) * decltype(bias)::kRowBytes + 8 * j * sizeof(Bits);
        if constexpr (sizeof(Element) == 2) {
          const uint32_t pair = ptx::load_shared(address);
          function(r, j, ptx::to_float(static_cast<uint16_t>(pair), Element{}),
                   ptx::to_float(static_cast<uint16_t>(pair >> 16), Element{}));
        } else {
          function(r, j, __uint_as_float(ptx::load_shared(address)),
                   __uint_as_float(ptx::load_shared(address + sizeof(Bits))));
        }
      }
    }
  }

  // scores = factor * scores + bias. Adding -inf to NaN leaves NaN, whose row the kernel computes again.
  __device__ __forceinline__ void add_bias(Scores& scores, float factor) const {
    for_each_bias([&](int r, int j, float low, float high) {
      scores.at(r, j, 0) = fmaf(scores.at(r, j, 0), factor, low);
      scores.at(r, j, 1) = fmaf(scores.at(r, j, 1), factor, high);
    });
  }

  // Calls function(r, j, e) for each of the thread's elements that the mask hides.
  template <class Function>
  __device__ __forceinline__ void for_each_masked(Function&& function) const {
    const uint32_t own = mask.address(Scores::row(0), Scores::column(0, 0));
#pragma unroll
    for (int r = 0; r < Scores::kThreadRows; ++r) {
#pragma unroll
      for (int j = 0; j < Scores::kColumnTiles; ++j) {
        const uint32_t pair = ptx::load_shared_u16(own + Scores::row_step(r) * decltype(mask)::kRowBytes + 8 * j);
        if ((pair & 0xFFu) == 0) function(r, j, 0);
        if ((pair & 0xFF00u) == 0) function(r, j, 1);
      }
    }
  }

  // What the mask hides becomes -inf.
  __device__ __forceinline__ void apply_mask(Scores& scores) const {
    for_each_masked([&](int r, int j, int e) { scores.at(r, j, e) = -INFINITY; });
  }

 private:
  template <class Target, class Tile>
  __device__ __forceinline__ static void copy(Target& target, const attention::BroadcastView& view, const Tile& where) {
    using T = std::conditional_t<std::is_same_v<Target, decltype(mask)>, uint8_t, Bits>;
    const attention::Coordinate at = {where.item.sequence.batch, where.item.head, where.first_row, where.first_column};
    target.copy_async(static_cast<const T*>(view.data) + view.offset(at), view, where.num_rows(), where.num_columns());
  }
};

struct NoBiasMask {};

}  // namespace flash_attn_ext
