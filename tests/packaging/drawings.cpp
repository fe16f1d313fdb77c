// The numbers in the drawings of docs/hopper.md are those of the kernels. drawn.h, which test_drawings.py writes, has
// the numbers that are drawn.
#include <cstdio>
#include <vector>

#include "drawn.h"
#include "kernels/config/sm90_forward.h"
#include "kernels/schedule/loop_order.h"

namespace {

using namespace flash_attn_ext;
using attention::Sequence;
using attention::Visibility;

// Of docs/drawings/shared_memory.py.
constexpr sm90::ForwardConfig default_config() {
  for (const sm90::ForwardConfig& config : sm90::kForwardConfigs) {
    if (config.dims == sm90::HeadDims{drawn::kHeadDim, drawn::kHeadDim} && config.score == ScoreMode::kScaleOnly) {
      return config;
    }
  }
  return {};
}
constexpr sm90::ForwardConfig kConfig = default_config();
static_assert(kConfig.warpgroups == drawn::kWarpgroups && kConfig.block_n == drawn::kKeys);
static_assert(kConfig.q_stages == drawn::kQueryStages && kConfig.kv_stages == drawn::kKeyStages);
static_assert(sm90::kSharedBytes == drawn::kLimitKib * 1024);

// Of docs/drawings/loop_order.py.
struct WorkTile {
  bool descends;
  int key_tile;
  std::vector<int> query_tiles;

  bool operator==(const WorkTile&) const = default;
};
const WorkTile kDrawn[] = DRAWN_WORK_TILES;

WorkTile computed(const LoopOrder& order, const Visibility& visibility, const Sequence& sequence, uint32_t index) {
  const LoopOrder::WorkTile at = order.work_tile(index);
  const LoopOrder::Tiles seen = LoopOrder::visible_query_tiles(visibility, sequence, at.tile);
  WorkTile found = {at.direction == LoopDirection::kDescending, at.tile, {}};
  for (int i = 0; i < seen.end - seen.begin; ++i) {
    found.query_tiles.push_back(found.descends ? seen.end - 1 - i : seen.begin + i);
  }
  return found;
}

}  // namespace

int main() {
  constexpr int kLength = drawn::kKeyTiles * LoopOrder::kKeys;
  const Visibility causal = {.right = 0};
  const Sequence sequence = {.num_queries = kLength, .num_keys = kLength};
  LoopOrder order;
  order.pairs = order.head_group_pairs = 2;
  order.tiles = order.phase_tiles = drawn::kKeyTiles;
  if (order.num_work_tiles() != std::size(kDrawn)) return 1;
  int last_rank[2] = {-1, -1};
  for (uint32_t index = 0; index < order.num_work_tiles(); ++index) {
    if (computed(order, causal, sequence, index) != kDrawn[index]) return 1;
    // Contributors of the query tile that is followed add in the order in which they are drawn.
    const LoopOrder::WorkTile at = order.work_tile(index);
    const LoopOrder::Contributor contributor = order.contributor(causal, sequence, at.tile, at.direction);
    const int rank = contributor.rank(drawn::kFollowed, contributor.contributors(drawn::kFollowed));
    if (rank != ++last_rank[at.pair]) return 1;
  }
  return 0;
}
