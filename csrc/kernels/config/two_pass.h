// The tile sizes of Hopper's two-pass backward kernels, with their reasons, and which kernels there are.
#pragma once

#include "kernels/config/sm90.h"

namespace flash_attn_ext::sm90 {

// The two-pass backward is for larger head dims, and for scores that more than a positive scale changes. The dQ kernel
// materialises P and dS, and the GEMM kernel computes dV and dK from them. These are the head dims that they are
// compiled for, the cheapest first.
inline constexpr HeadDims kTwoPassHeadDims[] = {{64, 64}, {128, 128}, {192, 128}, {192, 192}, {256, 256}};
inline constexpr int64_t kLargestTwoPassHeadDim = 256;

constexpr HeadDims two_pass_head_dims(int64_t qk, int64_t v) {
  for (const HeadDims& dims : kTwoPassHeadDims) {
    if (qk <= dims.qk && v <= dims.v) return dims;
  }
  return {};
}

// At smaller head dims, Plain calls take the key-stationary kernel. At larger ones, Q, dO, K and V leave no shared
// memory for a bias.
constexpr bool has_two_pass_kernel(HeadDims dims, Variant variant) {
  if (dims.qk > kLargestBackwardHeadDim) {
    return variant == Variant::kPlain || variant == Variant::kMask || variant == Variant::kModified;
  }
  return variant == Variant::kMask || variant == Variant::kBiasMask || variant == Variant::kExtended;
}

// The tile of a dQ CTA: 64 queries per consumer warpgroup stay, and tiles of 64 keys stream past in pipelines, with
// those of a bias beside K. S of the next tile is computed while dQ is, so that K needs two stages. With dp_ahead, dP
// of the next tile is computed there, too, and dQ overlaps P of the next tile. That is faster where registers hold it
// all, and shared memory a third stage (docs/kernels/log/sm90_backward.md, "Figures behind plans").
struct TwoPassTile {
  int key_stages;
  int value_stages;
  bool dp_ahead = false;
};
constexpr TwoPassTile two_pass_tile(HeadDims dims, Variant variant) {
  if (dims.qk <= 128) return {.key_stages = 3, .value_stages = 2};
  if (dims.v <= 128) return {.key_stages = 4, .value_stages = 3, .dp_ahead = variant == Variant::kPlain};
  return {.key_stages = 2, .value_stages = dims.v <= 192 ? 2 : 1};
}

// The registers of a producer thread, which may have to look up tiles of a mask, and of a consumer thread. One of the
// former and two of the latter are 504.
constexpr int two_pass_copy_registers(Variant variant) {
  if (variant == Variant::kMask) return 40;
  return variant == Variant::kBiasMask || variant == Variant::kExtended ? 72 : 24;
}
constexpr int two_pass_query_registers(Variant variant) { return 252 - two_pass_copy_registers(variant) / 2; }

// The tile of a CTA of the GEMM kernel: 64 keys per consumer warpgroup stay, and tiles of 64 queries stream past, in as
// many stages as shared memory holds. The more keys a CTA has, the fewer bytes L2 delivers for each GEMM. So there are
// as many warpgroups as accumulators leave registers for.
struct GemmTile {
  int warpgroups;  // consumers; the producer is one more
  int stages;
  int copy_registers;
  int registers;

  constexpr int keys() const { return 64 * warpgroups; }
  constexpr int flags() const { return 2 * warpgroups; }  // non-finite flags: one for 32 keys
};
constexpr GemmTile gemm_tile(HeadDims dims) {
  const int columns = dims.qk > dims.v ? dims.qk : dims.v;
  if (columns <= 128) return {.warpgroups = 4, .stages = columns <= 64 ? 5 : 4, .copy_registers = 64, .registers = 104};
  return {.warpgroups = 3, .stages = 4, .copy_registers = 32, .registers = 160};
}

}  // namespace flash_attn_ext::sm90
