// The tile sizes of Hopper's backward kernel for few queries that see all of many keys: queries stay, and tiles of keys
// stream past.
#pragma once

#include "kernels/tile_config_sm90.h"

namespace flash_attn_ext::sm90 {

inline constexpr int kFewQueries = 128;     // the most that a sequence may have
inline constexpr int kFewQueriesKeys = 64;  // of a tile

// As many stages of K and V as shared memory holds: dQ, dK and dV of a tile are computed while the next one's S and dP
// are, so two tiles are read at a time.
struct FewQueriesTile {
  int key_stages;
  int copy_registers;
  int registers;  // of a thread that computes
};
constexpr FewQueriesTile few_queries_tile(HeadDims dims) {
  return {.key_stages = dims.qk <= 64 ? 4 : 3, .copy_registers = 24, .registers = 240};
}

}  // namespace flash_attn_ext::sm90
