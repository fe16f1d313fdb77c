// Why a backend cannot run a call. Every call asks whether there is a reason, but few need its text, so sentences are
// put together only for those.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace flash_attn_ext::host {

class Reasons {
 public:
  enum class Wanted { kWhetherAny, kSentences };
  explicit Reasons(Wanted wanted) : wanted_(wanted) {}

  // `words` is a function that makes the sentence.
  template <class Words>
  void add(const Words& words) {
    any_ = true;
    if (wanted_ == Wanted::kSentences) sentences_.push_back(words());
  }

  bool any() const { return any_; }
  std::vector<std::string> sentences() && { return std::move(sentences_); }

 private:
  Wanted wanted_;
  bool any_ = false;
  std::vector<std::string> sentences_;
};

}  // namespace flash_attn_ext::host
