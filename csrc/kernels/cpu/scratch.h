// Uninitialised memory for tiles, aligned to a cache line.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace flash_attn_ext::cpu {

template <class Real>
class Scratch {
 public:
  Scratch() = default;
  explicit Scratch(int64_t size) { reserve(size); }

  // Makes room for `size` elements. If the memory has to grow, its contents are lost.
  void reserve(int64_t size) {
    if (size <= capacity_) return;
    memory_.reset();  // comes first, so that both are never held at once
    memory_.reset(static_cast<Real*>(::operator new(static_cast<size_t>(size) * sizeof(Real), kAlignment)));
    capacity_ = size;
  }

  Real* data() { return memory_.get(); }
  const Real* data() const { return memory_.get(); }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Release {
    void operator()(Real* memory) const { ::operator delete(memory, kAlignment); }
  };

  std::unique_ptr<Real, Release> memory_;
  int64_t capacity_ = 0;
};

}  // namespace flash_attn_ext::cpu
