// A plan as data: what explain() answers, and what describe() puts into words. It has what users and tests ask about,
// under names that Python has too (flash_attn_ext/_explanation.py); plan.h has what kernels need.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "kernels/plan/plan.h"

namespace flash_attn_ext::plan {

// Of a tile queries x keys; of head dims those of q and k x that of v.
using Sizes = std::pair<int64_t, int64_t>;
using Column = std::variant<bool, int64_t, std::string, Sizes>;

struct Report {
  std::string kernel;
  // What the kernel is compiled for and how it is launched, in the order in which it is said. A column that does not
  // apply is left out.
  std::vector<std::pair<const char*, Column>> columns{};
  std::string delta{};  // backward; empty: there is none
  std::string dbias{};  // likewise
  int64_t workspace_bytes = 0;
  std::vector<std::pair<const char*, int64_t>> workspace{};  // bytes of each part that there is
  // Of ForwardPlan::of_intervals.
  std::shared_ptr<const Report> intervals{};
};

Report report(const ForwardPlan& plan);
Report report(const BackwardPlan& plan);
std::string words_of(const Report& report);

}  // namespace flash_attn_ext::plan
