// Reports a plan as data: explain() reads a report as JSON, and describe() formats one as text. A report has what users
// and tests ask about, under the names of the fields of flash_attn_ext/_explanation.py. plan.h has what kernels need.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "kernels/plan/plan.h"

namespace flash_attn_ext::plan {

// The size of a tile, queries x keys; or two head dims, that of q and k x that of v.
using Sizes = std::pair<int64_t, int64_t>;
using Column = std::variant<bool, int64_t, std::string, Sizes>;

struct Report {
  std::string kernel;
  // What the kernel is compiled for and how it is launched, in the order of the text. A column that does not apply is
  // left out.
  std::vector<std::pair<const char*, Column>> columns{};
  std::string delta{};  // backward; empty: there is none
  std::string dbias{};  // the same
  int64_t workspace_bytes = 0;
  std::vector<std::pair<const char*, int64_t>> workspace{};  // the bytes of each part that is present
  // The report of ForwardPlan::of_intervals.
  std::shared_ptr<const Report> intervals{};
};

Report report(const ForwardPlan& plan);
Report report(const BackwardPlan& plan);
std::string words_of(const Report& report);
std::string json_of(const Report& report);  // with the words of the report, too

}  // namespace flash_attn_ext::plan
