// The tile sizes of Hopper's backward kernels that store scores, with their reasons, and which kernels there are.
#pragma once

#include "kernels/tile_config_sm90.h"

namespace flash_attn_ext::sm90 {

// Larger head dims, and scores that more than a positive scale changes: a kernel for dQ stores P and dS, and products
// make dV and dK of them. Head dims that these are compiled for, the cheaper ones first.
inline constexpr HeadDims kStoringHeadDims[] = {{64, 64}, {128, 128}, {192, 128}, {192, 192}, {256, 256}};
inline constexpr int64_t kLargestStoringHeadDim = 256;

constexpr HeadDims storing_head_dims(int64_t qk, int64_t v) {
  for (const HeadDims& dims : kStoringHeadDims) {
    if (qk <= dims.qk && v <= dims.v) return dims;
  }
  return {};
}

// Smaller head dims are Plain in the other kernel; in larger ones Q, dO, K and V leave no shared memory for a bias.
constexpr bool has_storing_kernel(HeadDims dims, Variant variant) {
  if (dims.qk > kLargestBackwardHeadDim) {
    return variant == Variant::kPlain || variant == Variant::kMask || variant == Variant::kModified;
  }
  return variant == Variant::kMask || variant == Variant::kBiasMask || variant == Variant::kExtended;
}

// A dQ block: 64 queries per computing warpgroup stay, tiles of 64 keys stream past in stages, those of a bias with
// them. S of the next tile is computed while dQ is, so K needs two; dp_ahead: and its dP, and dQ beside the next P,
// where registers hold it all and shared memory a third stage. (Plain; H200, (192, 128), S 8192 full and causal: 0.92
// and 0.96 of the time.)
struct StoringTile {
  int key_stages;
  int value_stages;
  bool dp_ahead = false;
};
constexpr StoringTile storing_tile(HeadDims dims, Variant variant) {
  if (dims.qk <= 128) return {.key_stages = 3, .value_stages = 2};
  if (dims.v <= 128) return {.key_stages = 4, .value_stages = 3, .dp_ahead = variant == Variant::kPlain};
  return {.key_stages = 2, .value_stages = dims.v <= 192 ? 2 : 1};
}

// Of a thread that copies, which may have tiles of a mask to look up, and of one that computes: 504 in all.
constexpr int storing_copy_registers(Variant variant) {
  if (variant == Variant::kMask) return 40;
  return variant == Variant::kBiasMask || variant == Variant::kExtended ? 72 : 24;
}
constexpr int storing_query_registers(Variant variant) { return 252 - storing_copy_registers(variant) / 2; }

// A block of the products: 64 keys per computing warpgroup stay, tiles of 64 queries stream past, in as many stages as
// shared memory holds. The more keys, the fewer bytes does L2 deliver for a product: as many warpgroups as sums leave
// registers for.
struct ProductTile {
  int warpgroups;  // that compute; one more starts the copies
  int stages;
  int copy_registers;
  int registers;

  constexpr int keys() const { return 64 * warpgroups; }
  constexpr int flags() const { return 2 * warpgroups; }  // of rows that met a NaN: one for 32 keys
};
constexpr ProductTile product_tile(HeadDims dims) {
  const int columns = dims.qk > dims.v ? dims.qk : dims.v;
  if (columns <= 128) return {.warpgroups = 4, .stages = columns <= 64 ? 5 : 4, .copy_registers = 64, .registers = 104};
  return {.warpgroups = 3, .stages = 4, .copy_registers = 32, .registers = 160};
}

}  // namespace flash_attn_ext::sm90
