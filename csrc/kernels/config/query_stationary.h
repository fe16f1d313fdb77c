// The table of Hopper's query-stationary backward kernels, for few queries and many keys, of which a boolean mask may
// hide any: queries stay, and key tiles stream past.
#pragma once

#include "kernels/config/sm90.h"
#include "kernels/config/tables.h"

namespace flash_attn_ext::sm90 {

inline constexpr int kStationaryQueries = 128;     // the most that a sequence may have
inline constexpr int kStationaryQueriesKeys = 64;  // of a key tile

// There are as many stages of K and V as shared memory holds. dQ, dK and dV of a tile are computed while S and dP of
// the next one are, so that two tiles are read at a time.
struct QueryStationaryConfig {
  HeadDims dims;
  ScoreMode score = ScoreMode::kScaleOnly;  // or kMask, of a boolean mask
  int kv_stages;
  int producer_registers = 24;  // of a thread
  int consumer_registers = 240;

  bool operator==(const QueryStationaryConfig&) const = default;
};
// A call takes the first row that holds its head dims and has its score mode.
inline constexpr QueryStationaryConfig kQueryStationaryConfigs[] = {
    {.dims = {64, 64}, .kv_stages = 4},
    {.dims = {128, 128}, .kv_stages = 3},
    {.dims = {64, 64}, .score = ScoreMode::kMask, .kv_stages = 4},
    {.dims = {128, 128}, .score = ScoreMode::kMask, .kv_stages = 3},
};

}  // namespace flash_attn_ext::sm90
