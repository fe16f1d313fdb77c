// Schedule on random problems. Each CTA has a tile of its own, and each tile has a CTA. Pairs come head-major or
// entry-major. Heads come in L2 head groups, of which the last one is the largest. Within a group, tiles come in
// descending order of their rows. The order is ascending where all rows see the same keys and the last tile has fewer
// rows.
#include "kernels/schedule/schedule.cuh"

#include <cstdio>
#include <random>
#include <set>
#include <tuple>
#include <vector>

namespace {

using namespace flash_attn_ext;

struct Problem {
  attention::AttentionParams params = {};
  Division division = {};
};

bool fails(const char* what, const Problem& problem) {
  const attention::AttentionParams& p = problem.params;
  const Division& of = problem.division;
  std::printf("%s: batch %d, heads %d over %d, lengths %d, %d, window %d, tiles of %d rows, %d slices, L2 %d, 1 / %d\n",
              what, static_cast<int>(p.batch), static_cast<int>(p.num_heads_q), static_cast<int>(p.num_heads_k),
              static_cast<int>(p.sequences.max_seqlen_q), static_cast<int>(p.sequences.max_seqlen_k),
              static_cast<int>(p.visibility.unlimited() ? -1 : p.visibility.left), of.tile_rows,
              static_cast<int>(of.slices), static_cast<int>(of.l2_bytes), static_cast<int>(of.smaller_head_groups));
  return false;
}

// The index of a place's head among all heads, in the order in which the schedule counts them.
uint32_t head_of(const Problem& problem, const Schedule& schedule, const Place& place) {
  const auto batch = static_cast<uint32_t>(problem.params.batch);
  const auto key_heads = static_cast<uint32_t>(problem.params.num_heads_k);
  const uint32_t pair = problem.division.order == PairOrder::kHeadMajor ? place.key_head * batch + place.batch
                                                                        : place.batch * key_heads + place.key_head;
  return pair * schedule.heads.divisor + place.head_of_group;
}

bool is_right(const Problem& problem) {
  const attention::AttentionParams& p = problem.params;
  const Division& of = problem.division;
  const Schedule schedule = make_schedule(p, of);
  const bool queries = of.rows == Rows::kQueries;
  const uint32_t heads_of_pair = queries ? static_cast<uint32_t>(p.queries_per_key_head()) : 1;
  const uint32_t heads = static_cast<uint32_t>(p.batch * p.num_heads_k) * heads_of_pair;
  if (schedule.num_blocks != heads * schedule.tiles * of.slices) return fails("blocks", problem);
  if (schedule.num_head_groups == 0 || schedule.rest.divisor == 0) return fails("no last head group", problem);
  const int64_t rows = queries ? p.sequences.max_seqlen_q : p.sequences.max_seqlen_k;
  const bool is_uneven = p.visibility.unlimited() && of.uneven_heads > 1 && rows % of.tile_rows != 0;
  if (schedule.ascends != is_uneven) return fails("the wrong way round", problem);
  if (is_uneven && (schedule.together.divisor != 1 || schedule.rest.divisor > of.uneven_heads)) {
    return fails("too many heads together", problem);
  }
  const uint32_t before = (schedule.num_head_groups - 1) * schedule.together.divisor;
  if (before + schedule.rest.divisor != heads) return fails("heads of head groups", problem);
  // The size of the other groups is rounded up, so the last one may be a little smaller.
  if (of.smaller_head_groups > 1 && schedule.num_head_groups > 1 &&
      schedule.together.divisor > schedule.rest.divisor + 1) {
    return fails("the last head group is small", problem);
  }
  std::set<std::tuple<uint32_t, uint32_t, uint32_t, uint32_t, uint32_t>> seen;
  uint32_t group = 0;
  uint32_t tile = 0;
  for (uint32_t block = 0; block < schedule.num_blocks; ++block) {
    const Place at = schedule.place(block);
    const bool exists = at.batch < p.batch && at.key_head < p.num_heads_k && at.head_of_group < heads_of_pair &&
                        at.tile < schedule.tiles && at.slice < of.slices;
    if (!exists) return fails("a place that there is not", problem);
    if (!seen.insert({at.batch, at.key_head, at.head_of_group, at.tile, at.slice}).second) {
      return fails("a place twice", problem);
    }
    const uint32_t of_head =
        std::min(head_of(problem, schedule, at) / schedule.together.divisor, schedule.num_head_groups - 1);
    const uint32_t own = schedule.ascends ? schedule.tiles - 1 - at.tile : at.tile;
    const bool follows = of_head == group ? own == tile || own == tile + 1 : own == 0;
    if (of_head < group || of_head > group + 1 || !follows) return fails("order", problem);
    group = of_head;
    tile = own;
  }
  return true;
}

}  // namespace

int main() {
  std::mt19937 random(1);
  const auto draw = [&](int from, int to) { return std::uniform_int_distribution<int>(from, to)(random); };
  for (int i = 0; i < 3000; ++i) {
    Problem problem;
    attention::AttentionParams& p = problem.params;
    p.batch = draw(1, 5);
    p.num_heads_k = draw(1, 6);
    p.num_heads_q = p.num_heads_k * draw(1, 4);
    p.sequences.max_seqlen_q = draw(1, 700);
    p.sequences.max_seqlen_k = draw(1, 700);
    p.head_dim_qk = p.head_dim_v = 64;
    if (draw(0, 3) > 0) p.visibility.right = 0;
    if (draw(0, 3) == 0) p.visibility.left = draw(0, 300);
    problem.division = {.pairs = all_pairs(p),
                        .order = draw(0, 1) == 0 ? PairOrder::kHeadMajor : PairOrder::kEntryMajor,
                        .rows = draw(0, 1) == 0 ? Rows::kQueries : Rows::kKeys,
                        .tile_rows = 64 * draw(1, 3),
                        .slices = draw(1, 2),
                        .element_bytes = 2,
                        .l2_bytes = int64_t{1} << draw(10, 24),
                        .smaller_head_groups = int64_t{1} << draw(0, 4),
                        .uneven_heads = draw(1, 8)};
    if (!is_right(problem)) return 1;
  }
  return 0;
}
