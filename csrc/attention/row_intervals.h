// The keys that each query sees by intervals that the user gives. They are a mask in another form: one that takes
// memory for each query, not for each pair of a query and a key.
#pragma once

#include <cstdint>

#include "attention/host_device.h"
#include "attention/sequence.h"

namespace flash_attn_ext::attention {

// A (batch, heads, queries, 2 count) tensor of int32. Interval m of a query has its begin in column 2 m, and its end,
// which is exclusive, in column 2 m + 1. Keys are positions inside the sequence. Intervals may overlap, be empty, and
// have any order. A broadcast dimension has stride 0. In a packed batch the batch stride is 0, and queries count over
// all sequences.
struct RowIntervals {
  static constexpr int kMost = 4;

  const int32_t* data = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t query_stride = 0;
  int count = 0;

  FLASH_HOST_DEVICE bool present() const { return data != nullptr; }

  // The begins and ends of a query, which must exist.
  FLASH_HOST_DEVICE const int32_t* row(const Sequence& sequence, int64_t head, int64_t query) const {
    return data + sequence.batch * batch_stride + head * head_stride + (sequence.query_begin + query) * query_stride;
  }

  // Whether a query sees a key. row: as row() returns it, here and below.
  FLASH_HOST_DEVICE bool sees(const int32_t* row, int64_t key) const {
    bool seen = false;
    for (int m = 0; m < count; ++m) seen |= row[2 * m] <= key && key < row[2 * m + 1];
    return seen;
  }

  // Bit i says whether the query sees key first + i, for 32 keys.
  FLASH_HOST_DEVICE uint32_t word(const int32_t* row, int first) const {
    uint32_t bits = 0;
    for (int m = 0; m < count; ++m) bits |= word(row[2 * m], row[2 * m + 1], first);
    return bits;
  }
  // The same for one interval.
  FLASH_HOST_DEVICE static uint32_t word(int32_t begin, int32_t end, int first) {
    return from(after(begin, first)) & ~from(after(end, first));
  }

  // The same for 128 keys, in the order of MaskBits: the word of a thread of a quad.
  FLASH_HOST_DEVICE uint32_t quad_word(const int32_t* row, int first, int thread) const {
    uint32_t bits = 0;
    for (int m = 0; m < count; ++m) bits |= quad_word(row[2 * m], row[2 * m + 1], first, thread);
    return bits;
  }
  // The same for one interval.
  FLASH_HOST_DEVICE static uint32_t quad_word(int32_t begin, int32_t end, int first, int thread) {
    return quad_from(after(begin, first), thread) & ~quad_from(after(end, first), thread);
  }

 private:
  FLASH_HOST_DEVICE static int clamp(int x, int highest) { return x < 0 ? 0 : x < highest ? x : highest; }

  // How far a begin or end lies after the key. The host does not check them in a GPU's memory, so negative ones are
  // clamped, and the difference fits 32 bits.
  FLASH_HOST_DEVICE static int after(int32_t end, int key) { return (end < 0 ? 0 : end) - key; }

  // The bits from `bit` on.
  FLASH_HOST_DEVICE static uint32_t from(int bit) { return bit >= 32 ? 0 : ~uint32_t{0} << (bit < 0 ? 0 : bit); }

  // The bits of keys from `key` on. Each 8 keys have two bits in the thread's word.
  FLASH_HOST_DEVICE static uint32_t quad_from(int key, int thread) {
    const int bounded = clamp(key, 128);
    return from(2 * (bounded >> 3) + clamp((bounded & 7) - 2 * thread, 2));
  }
};

}  // namespace flash_attn_ext::attention
