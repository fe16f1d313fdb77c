// The table of Hopper's query-stationary backward kernels, for few queries that see all of many keys: queries stay, and
// key tiles stream past.
#pragma once

#include "kernels/config/sm90.h"

namespace flash_attn_ext::sm90 {

inline constexpr int kStationaryQueries = 128;     // the most that a sequence may have
inline constexpr int kStationaryQueriesKeys = 64;  // of a key tile

// There are as many stages of K and V as shared memory holds. dQ, dK and dV of a tile are computed while S and dP of
// the next one are, so that two tiles are read at a time.
struct QueryStationaryConfig {
  HeadDims dims;
  int kv_stages;
  int producer_registers = 24;  // of a thread
  int consumer_registers = 240;

  bool operator==(const QueryStationaryConfig&) const = default;
};
// A call takes the first row that holds its head dims.
inline constexpr QueryStationaryConfig kQueryStationaryConfigs[] = {{.dims = {64, 64}, .kv_stages = 4},
                                                                    {.dims = {128, 128}, .kv_stages = 3}};

}  // namespace flash_attn_ext::sm90
