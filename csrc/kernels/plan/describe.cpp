#include <algorithm>
#include <sstream>

#include "kernels/plan/report.h"

namespace flash_attn_ext::plan {
namespace {

struct PrintValue {
  std::ostringstream& words;

  void operator()(bool) const {}  // its name suffices
  void operator()(int64_t value) const { words << " " << value; }
  void operator()(const std::string& value) const { words << " " << value; }
  void operator()(const Sizes& value) const { words << " " << value.first << " x " << value.second; }
};

void print_columns(std::ostringstream& words, const Report& report) {
  const char* separator = " (";
  for (const auto& [name, value] : report.columns) {
    std::string name_in_words = name;
    std::ranges::replace(name_in_words, '_', ' ');
    words << separator << name_in_words;
    std::visit(PrintValue{words}, value);
    separator = ", ";
  }
  if (!report.columns.empty()) words << ")";
}

void print_workspace(std::ostringstream& words, const Report& report) {
  if (report.workspace_bytes == 0) {
    words << "; no workspace";
    return;
  }
  words << "; workspace " << report.workspace_bytes << " bytes";
  const char* separator = " (";
  for (const auto& [name, bytes] : report.workspace) {
    words << separator << name << " " << bytes;
    separator = ", ";
  }
  words << ")";
}

}  // namespace

std::string words_of(const Report& report) {
  std::ostringstream words;
  words << report.kernel;
  print_columns(words, report);
  if (!report.delta.empty()) words << "; delta " << report.delta;
  if (!report.dbias.empty()) words << "; dBias " << report.dbias;
  print_workspace(words, report);
  if (report.intervals) {
    words << "; batch entries whose mask leaves one key interval: " << words_of(*report.intervals);
  }
  return words.str();
}

std::string describe(const ForwardPlan& plan) { return words_of(report(plan)); }
std::string describe(const BackwardPlan& plan) { return words_of(report(plan)); }
std::string describe(const TangentPlan& plan) { return "one kernel, head dim " + std::to_string(plan.head_dim); }

}  // namespace flash_attn_ext::plan
