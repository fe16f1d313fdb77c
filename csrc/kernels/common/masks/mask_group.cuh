// 128 keys of a mask, as bits.
#pragma once

#include <cstdint>

#include "attention/score_mod.h"

namespace flash_attn_ext::common {

inline constexpr int kVectorBytes = 16;
static_assert(attention::MaskBits::kKeys == 2 * attention::MaskTiles::kSize);

// The place of 128 keys of a query in memory. Fewer keys may exist, or none.
struct KeyGroup {
  const uint8_t* first;
  int64_t key_stride;
  int keys;

  __device__ __forceinline__ bool in_vectors() const {
    return key_stride == 1 && keys == attention::MaskBits::kKeys &&
           reinterpret_cast<uintptr_t>(first) % kVectorBytes == 0;
  }
};

// The bits of the group in the order of MaskBits: key 8 j + 2 t + e is bit 2 j + e of word t.
struct GroupBits {
  uint32_t words[4] = {};
  uint32_t missing[4] = {};  // keys that do not exist

  // Called by all lanes of a warp, each with a group of its own.
  __device__ __forceinline__ void read(const KeyGroup& own) {
    const bool in_vectors = own.in_vectors();
    if (in_vectors) read_vectors(own);
    if (own.keys <= 0) {
#pragma unroll
      for (uint32_t& word : missing) word = ~0u;
    }
    uint32_t pending = __ballot_sync(kAllLanes, !in_vectors && own.keys > 0);
#pragma unroll 1
    while (pending != 0) {
      int owners[kGroupsAtOnce];
      uint8_t bytes[kGroupsAtOnce][4];
      int keys[kGroupsAtOnce];
#pragma unroll
      for (int i = 0; i < kGroupsAtOnce; ++i) {
        owners[i] = pending == 0 ? kNoLane : __ffs(static_cast<int>(pending)) - 1;
        pending &= pending - 1;
        keys[i] = read_together(bytes[i], own, owners[i]);
      }
#pragma unroll
      for (int i = 0; i < kGroupsAtOnce; ++i) take(bytes[i], keys[i], owners[i]);
    }
  }

  // The MaskTiles flags of the group's two tiles, a byte each.
  __device__ __forceinline__ uint32_t tile_flags() const {
    uint32_t some_true = 0;
    uint32_t some_false = 0;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      some_true |= words[t];
      some_false |= ~(words[t] | missing[t]);
    }
    const auto flags = [&](uint32_t half) {
      return ((some_true & half) != 0 ? attention::MaskTiles::kSomeTrue : 0u) |
             ((some_false & half) != 0 ? attention::MaskTiles::kSomeFalse : 0u);
    };
    return flags(0xFFFFu) | flags(0xFFFF0000u) << 8;
  }

 private:
  static constexpr uint32_t kAllLanes = 0xFFFFFFFFu;
  static constexpr int kNoLane = 32;
  static constexpr int kGroupsAtOnce = 8;

  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  // The key whose bit a lane's vote makes: bit `lane` of word t.
  __device__ __forceinline__ static int key_of_lane(int t) { return lane() / 2 * 8 + 2 * t + lane() % 2; }

  __device__ __forceinline__ void read_vectors(const KeyGroup& own) {
#pragma unroll
    for (int i = 0; i < attention::MaskBits::kKeys / kVectorBytes; ++i) {
      const uint4 bytes = reinterpret_cast<const uint4*>(own.first)[i];
      add(words, {bytes.x, bytes.y}, 2 * i);
      add(words, {bytes.z, bytes.w}, 2 * i + 1);
    }
  }

  // Reads four keys per lane of the owner's group. Returns how many keys the group has.
  __device__ __forceinline__ static int read_together(uint8_t (&bytes)[4], const KeyGroup& own, int owner) {
    const auto first = __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(own.first), owner);
    const int keys = owner == kNoLane ? 0 : __shfl_sync(kAllLanes, own.keys, owner);
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const int key = key_of_lane(t);
      bytes[t] = key < keys ? reinterpret_cast<const uint8_t*>(first)[key * own.key_stride] : uint8_t{0};
    }
    return keys;
  }
  __device__ __forceinline__ void take(const uint8_t (&bytes)[4], int keys, int owner) {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const uint32_t attended = __ballot_sync(kAllLanes, bytes[t] != 0);
      const uint32_t beyond = __ballot_sync(kAllLanes, key_of_lane(t) >= keys);
      if (lane() != owner) continue;
      words[t] = attended;
      missing[t] = beyond;
    }
  }

  // Adds the bits of 8 keys, given as bytes that are 0 or 1.
  __device__ __forceinline__ static void add(uint32_t (&to)[4], uint2 bytes, int j) {
    const uint32_t halves[4] = {bytes.x & 0xFFFFu, bytes.x >> 16, bytes.y & 0xFFFFu, bytes.y >> 16};
#pragma unroll
    for (int t = 0; t < 4; ++t) to[t] |= ((halves[t] | halves[t] >> 7) & 3u) << (2 * j);
  }
};

}  // namespace flash_attn_ext::common
