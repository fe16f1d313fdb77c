// What intervals and blocks leave of the keys for a tile of queries, so that slices of keys that no query sees are
// skipped.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention/params.h"

namespace flash_attn_ext::cpu {

class SelectedKeys {
 public:
  explicit SelectedKeys(const attention::AttentionParams& params) : p_(params), all_seen_(params.score_mod) {
    all_seen_.intervals = {};
    all_seen_.blocks = {};
  }

  // The queries of all these heads.
  void start(const attention::Sequence& sequence, const attention::Interval& heads,
             const attention::Interval& queries) {
    start_blocks(sequence, heads, queries);
    rows_.clear();
    if (!p_.score_mod.intervals.present()) return;
    const bool per_head = p_.score_mod.intervals.head_stride != 0;
    for (int64_t head = heads.begin; head < (per_head ? heads.end : heads.begin + 1); ++head) {
      for (int64_t query = queries.begin; query < queries.end; ++query) {
        rows_.push_back(p_.score_mod.intervals.row(sequence, head, query));
      }
    }
  }

  // Which of these keys the queries see by their intervals and blocks. A union of intervals may cover more than this
  // knows.
  attention::TileCoverage coverage(const attention::Interval& keys) const {
    const attention::TileCoverage of_blocks = coverage_of_blocks(keys);
    if (of_blocks != attention::TileCoverage::kFull) {
      const bool none =
          of_blocks == attention::TileCoverage::kNone || coverage_of_intervals(keys) == attention::TileCoverage::kNone;
      return none ? attention::TileCoverage::kNone : attention::TileCoverage::kPartial;
    }
    return coverage_of_intervals(keys);
  }

  // What modifies the scores of keys with that coverage.
  const attention::ScoreMod& score_mod(attention::TileCoverage coverage) const {
    return coverage == attention::TileCoverage::kFull ? all_seen_ : p_.score_mod;
  }

 private:
  attention::TileCoverage coverage_of_intervals(const attention::Interval& keys) const {
    const int count = p_.score_mod.intervals.count;
    if (count == 0) return attention::TileCoverage::kFull;
    bool all = true, none = true;
    for (const int32_t* row : rows_) {
      bool covers = false;
      for (int m = 0; m < count; ++m) {
        covers |= row[2 * m] <= keys.begin && keys.end <= row[2 * m + 1];
        none &= std::max<int64_t>(row[2 * m], keys.begin) >= std::min<int64_t>(row[2 * m + 1], keys.end);
      }
      all &= covers;
    }
    return none  ? attention::TileCoverage::kNone
           : all ? attention::TileCoverage::kFull
                 : attention::TileCoverage::kPartial;
  }

  // The rows of the blocks that have the queries, each once.
  void start_blocks(const attention::Sequence& sequence, const attention::Interval& heads,
                    const attention::Interval& queries) {
    block_rows_.clear();
    const attention::BlockMask& blocks = p_.score_mod.blocks;
    if (!blocks.present()) return;
    for (int64_t head = heads.begin; head < (blocks.head_stride != 0 ? heads.end : heads.begin + 1); ++head) {
      const int64_t first = queries.begin >> blocks.query_shift << blocks.query_shift;
      for (int64_t query = first; query < queries.end; query += int64_t{1} << blocks.query_shift) {
        block_rows_.push_back(blocks.row(sequence.batch, head, query));
      }
    }
  }

  attention::TileCoverage coverage_of_blocks(const attention::Interval& keys) const {
    const attention::BlockMask& blocks = p_.score_mod.blocks;
    if (!blocks.present()) return attention::TileCoverage::kFull;
    bool all = true, none = true;
    const int64_t first = keys.begin >> blocks.key_shift << blocks.key_shift;
    for (const uint8_t* row : block_rows_) {
      for (int64_t key = first; key < keys.end; key += int64_t{1} << blocks.key_shift) {
        const bool seen = blocks.sees(row, key);
        all &= seen;
        none &= !seen;
      }
    }
    return none  ? attention::TileCoverage::kNone
           : all ? attention::TileCoverage::kFull
                 : attention::TileCoverage::kPartial;
  }

  const attention::AttentionParams& p_;
  attention::ScoreMod all_seen_;
  std::vector<const int32_t*> rows_;
  std::vector<const uint8_t*> block_rows_;
};

}  // namespace flash_attn_ext::cpu
