// The bits of BlockMask against the flags of pairs of blocks, in the order of MaskBits, also past the last block.
#include "attention/block_mask.h"

#include <cstdio>
#include <random>
#include <vector>

namespace {

using flash_attn_ext::attention::BlockMask;

struct Table {
  int batches, heads, rows, columns;
  std::vector<uint8_t> flags;

  bool at(int batch, int head, int row, int column) const {
    return flags[((batch * heads + head) * rows + row) * columns + column] != 0;
  }
};

// The block of a position; positions past the last block take that one.
int block_of(int position, int shift, int count) {
  const int block = position >> shift;
  return block < count ? block : count - 1;
}

bool agrees(const BlockMask& blocks, const Table& table, int batch, int head, int query) {
  const uint8_t* row = blocks.row(batch, head, query);
  const int own = block_of(query, blocks.query_shift, table.rows);
  const auto expects = [&](int key) {
    return table.at(table.batches == 1 ? 0 : batch, table.heads == 1 ? 0 : head, own,
                    block_of(key, blocks.key_shift, table.columns));
  };
  for (int first = 0; first < ((table.columns + 2) << blocks.key_shift); first += 64) {
    if (blocks.sees(row, first + 13) != expects(first)) return false;
    for (int keys : {64, 128}) {
      const uint32_t word = blocks.quad_word(row, first, keys);
      for (int bit = 0; bit < keys / 4; ++bit) {
        for (int thread = 0; thread < 4; ++thread) {
          if ((word >> bit & 1) != (expects(first + bit / 2 * 8 + 2 * thread + bit % 2) ? 1u : 0u)) return false;
        }
      }
    }
  }
  return true;
}

}  // namespace

int main() {
  std::mt19937 generator(0);
  const auto draw = [&](int most) { return 1 + static_cast<int>(generator() % static_cast<unsigned>(most)); };
  for (int trial = 0; trial < 300; ++trial) {
    Table table = {.batches = draw(2), .heads = draw(2), .rows = draw(4), .columns = draw(5), .flags = {}};
    table.flags.resize(static_cast<size_t>(table.batches * table.heads * table.rows * table.columns));
    for (uint8_t& flag : table.flags) flag = generator() % 2;
    const auto stride = [](int count, int elements) { return count == 1 ? 0 : elements; };
    const BlockMask blocks = {.data = table.flags.data(),
                              .batch_stride = stride(table.batches, table.heads * table.rows * table.columns),
                              .head_stride = stride(table.heads, table.rows * table.columns),
                              .query_stride = stride(table.rows, table.columns),
                              .query_shift = 6 + static_cast<int>(generator() % 2),
                              .key_shift = 6 + static_cast<int>(generator() % 2),
                              .last_query_block = table.rows - 1,
                              .last_key_block = table.columns - 1};
    for (int batch = 0; batch < 2; ++batch) {
      for (int head = 0; head < 2; ++head) {
        for (int query = 0; query < ((table.rows + 1) << blocks.query_shift); query += 31) {
          if (agrees(blocks, table, batch, head, query)) continue;
          std::printf("trial %d: batch %d, head %d, query %d\n", trial, batch, head, query);
          return 1;
        }
      }
    }
  }
  return 0;
}
