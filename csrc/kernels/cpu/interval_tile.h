// What intervals leave of the keys for a tile of queries, so that slices of keys that no query sees are skipped.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention/params.h"

namespace flash_attn_ext::cpu {

class IntervalTile {
 public:
  explicit IntervalTile(const attention::AttentionParams& params) : p_(params), without_intervals_(params.score_mod) {
    without_intervals_.intervals = {};
  }

  // The queries of all these heads.
  void start(const attention::Sequence& sequence, const attention::Interval& heads,
             const attention::Interval& queries) {
    rows_.clear();
    if (!p_.score_mod.intervals.present()) return;
    const bool per_head = p_.score_mod.intervals.head_stride != 0;
    for (int64_t head = heads.begin; head < (per_head ? heads.end : heads.begin + 1); ++head) {
      for (int64_t query = queries.begin; query < queries.end; ++query) {
        rows_.push_back(p_.score_mod.intervals.row(sequence, head, query));
      }
    }
  }

  // Which of these keys the queries see by their intervals. A union of intervals may cover more than this knows.
  attention::TileCoverage coverage(const attention::Interval& keys) const {
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

  // What modifies the scores of keys with that coverage.
  const attention::ScoreMod& score_mod(attention::TileCoverage coverage) const {
    return coverage == attention::TileCoverage::kFull ? without_intervals_ : p_.score_mod;
  }

 private:
  const attention::AttentionParams& p_;
  attention::ScoreMod without_intervals_;
  std::vector<const int32_t*> rows_;
};

}  // namespace flash_attn_ext::cpu
