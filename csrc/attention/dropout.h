// Dropout bits as a pure function of (seed, batch, head, query, key), so that every backend, tile size and pass draws
// the same ones and nothing has to be stored.
//
// Philox-4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 4: the
// fewest rounds that pass BigCrush). One call gives 128 bits = 8 draws of 16 bits, for queries {q, q + 8} x keys {k, k
// + 8, k + 16, k + 24} of a block of 16 queries x 32 keys. These are elements that one thread owns in an mma
// accumulator tile, whether its rows are queries (forward, dQ) or keys (dK/dV).
#pragma once

#include <cstdint>

#include "attention/host_device.h"

namespace flash_attn_ext::attention {

struct PhiloxCounter {
  uint32_t word[4];
};

// Advances several counters at a time, because they share the keys of each round.
template <int kCount>
FLASH_HOST_DEVICE void philox_4x32_7(PhiloxCounter (&counters)[kCount], uint64_t seed) {
  uint32_t key0 = static_cast<uint32_t>(seed);
  uint32_t key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 7; ++round) {
    for (PhiloxCounter& counter : counters) {
      const uint64_t product0 = uint64_t{0xD2511F53u} * counter.word[0];
      const uint64_t product1 = uint64_t{0xCD9E8D57u} * counter.word[2];
      counter = {{static_cast<uint32_t>(product1 >> 32) ^ counter.word[1] ^ key0, static_cast<uint32_t>(product1),
                  static_cast<uint32_t>(product0 >> 32) ^ counter.word[3] ^ key1, static_cast<uint32_t>(product0)}};
    }
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}

struct Dropout {
  static constexpr int kBlockQueries = 16;
  static constexpr int kBlockKeys = 32;

  const int64_t* seed = nullptr;  // in the memory of the device that runs the kernel; null: no dropout
  uint32_t threshold = 0;         // a 16-bit draw below it drops its weight; it is p * 2^16, rounded, but never 0
  double rescale = 1.0;           // 1 / (1 - p)

  FLASH_HOST_DEVICE bool enabled() const { return seed != nullptr; }

  // The indices of the block that holds a query or a key.
  FLASH_HOST_DEVICE static uint32_t query_block(int64_t query) {
    return static_cast<uint32_t>(static_cast<uint64_t>(query) / kBlockQueries);
  }
  FLASH_HOST_DEVICE static uint32_t key_block(int64_t key) {
    return static_cast<uint32_t>(static_cast<uint64_t>(key) / kBlockKeys);
  }

  // The counter of the 8 draws of queries 8 m + i and keys 8 n + j of a block. query_counter is 8 * (the block's index
  // along queries) + i, and key_counter is 8 * (its index along keys) + j.
  FLASH_HOST_DEVICE static PhiloxCounter counter(uint32_t batch, uint32_t head, uint32_t query_counter,
                                                 uint32_t key_counter) {
    return {{key_counter, query_counter, head, batch}};
  }

  // The 8 draws that (query, key) shares with its partners.
  FLASH_HOST_DEVICE PhiloxCounter draws(int64_t batch, int64_t head, int64_t query, int64_t key) const {
    PhiloxCounter counters[] = {counter(static_cast<uint32_t>(batch), static_cast<uint32_t>(head),
                                        query_block(query) * 8 + static_cast<uint32_t>(query % 8),
                                        key_block(key) * 8 + static_cast<uint32_t>(key % 8))};
    philox_4x32_7(counters, static_cast<uint64_t>(*seed));
    return counters[0];
  }

  // Whether the weight of query 8 m + i and key 8 n + j of a block is kept. `word` is word n of the draws; it holds the
  // draw of m = 0 in its lower half and that of m = 1 in its upper half.
  FLASH_HOST_DEVICE bool keeps(uint32_t word, int query_half) const {
    // The comparison takes place in the upper half, because one of the two draws is already there.
    return (query_half == 0 ? word << 16 : word) >= threshold << 16;
  }

  // Whether the weight of (query, key) is kept, given the 8 draws that it shares.
  FLASH_HOST_DEVICE bool keeps(const PhiloxCounter& draws, int64_t query, int64_t key) const {
    return keeps(draws.word[(key / 8) % 4], static_cast<int>((query / 8) % 2));
  }
};

}  // namespace flash_attn_ext::attention
