// Where a sequence's keys lie: in rows of their own, or in a cache, contiguous or in pages.
#pragma once

#include <cstdint>

#include "attention/division.h"
#include "attention/host_device.h"

namespace flash_attn_ext::attention {

// A row of k or v, as MatrixView::row takes it.
struct KeyRow {
  int64_t entry;  // index of the first dimension: a batch entry, or a page
  int64_t row;
};

// A cache of keys and values. Its lengths and tables are in the memory of the device that runs the kernel, so the host
// cannot check them without waiting for a GPU. They are clamped instead: whatever they hold, no row outside the cache
// is addressed.
struct KvCache {
  const int32_t* seqlens = nullptr;      // (batch,): keys in the cache before this call; null: k and v are no cache
  const int32_t* batch_index = nullptr;  // (batch,): a sequence's entry of a contiguous cache; null: that of its index
  const int32_t* block_table = nullptr;  // (batch, pages): the page of keys [i * page_size, ...); null: contiguous
  int64_t table_stride = 0;              // from one sequence's pages to the next one's
  int64_t num_entries = 0;               // batch entries of a contiguous cache, or pages
  Divisor page_size = {};                // keys: a multiple of kPageMultiple
  int64_t num_new = 0;                   // keys that this call appended to each sequence

  // Each group of this many keys that begins at a multiple of it lies in consecutive rows.
  static constexpr int kPageMultiple = 16;

  FLASH_HOST_DEVICE bool present() const { return seqlens != nullptr; }
  FLASH_HOST_DEVICE bool paged() const { return block_table != nullptr; }

  // A sequence's number of keys before this call, and with the new ones. capacity: the most keys that it can have.
  FLASH_HOST_DEVICE int64_t num_old(int64_t batch, int64_t capacity) const { return clamp(seqlens[batch], capacity); }
  FLASH_HOST_DEVICE int64_t num_keys(int64_t batch, int64_t capacity) const {
    return clamp(num_old(batch, capacity) + num_new, capacity);
  }

  FLASH_HOST_DEVICE KeyRow row(int64_t batch, int64_t key) const {
    if (!paged()) return {batch_index == nullptr ? batch : clamp(batch_index[batch], num_entries - 1), key};
    const uint32_t page = page_size.quotient(static_cast<uint32_t>(key));
    return {clamp(block_table[batch * table_stride + page], num_entries - 1), key - page * page_size.divisor};
  }

 private:
  FLASH_HOST_DEVICE static int64_t clamp(int64_t value, int64_t highest) {
    return value < 0 ? 0 : value < highest ? value : highest;
  }
};

}  // namespace flash_attn_ext::attention
