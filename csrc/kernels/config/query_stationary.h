// The tile sizes of Hopper's query-stationary backward kernel, for few queries that see all of many keys: queries stay,
// and key tiles stream past.
#pragma once

#include "kernels/config/sm90.h"

namespace flash_attn_ext::sm90 {

inline constexpr int kStationaryQueries = 128;     // the most that a sequence may have
inline constexpr int kStationaryQueriesKeys = 64;  // of a key tile

// There are as many stages of K and V as shared memory holds. dQ, dK and dV of a tile are computed while S and dP of
// the next one are, so that two tiles are read at a time.
struct QueryStationaryCtaTile {
  int key_stages;
  int copy_registers;  // of a producer thread
  int registers;       // of a consumer thread
};
constexpr QueryStationaryCtaTile query_stationary_cta_tile(HeadDims dims) {
  return {.key_stages = dims.qk <= 64 ? 4 : 3, .copy_registers = 24, .registers = 240};
}

}  // namespace flash_attn_ext::sm90
