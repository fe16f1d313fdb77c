// Query chunks of the key-stationary backward pass on Hopper. Where L2 does not hold the float32 sums of dQ of a head,
// each launch has a chunk of the head's queries, and all key tiles that see something of it.
//
// A key tile keeps dK and dV in registers during a launch, and in float32 memory until the next one. Pairs in ascending
// order go from the first chunk to the last, and pairs in descending order from the last to the first. So a key tile
// iterates over query tiles in the same order as without chunks, and gradients have the same bits, unless a launch has
// room for the partial sums of one pair only: then all pairs ascend. In causal calls all launches have about as much to
// do.
//
// In cyclic order each chunk has a cycle of its own: a key tile wraps around in the chunk, and ranks follow from the
// chunk's query tiles.
#pragma once

#include "kernels/schedule/loop_order.h"

namespace flash_attn_ext {

struct QueryChunks {
  static constexpr int64_t kWorkBytes = 128;  // of a ChunkedKeyTileWork, which describes a key tile to a kernel

  int tiles = 0;  // query tiles of a chunk; 0: heads are not divided into chunks
  int count = 1;  // chunks of the longest sequence, and launches of a pair

  FLASH_HOST_DEVICE bool present() const { return tiles > 0; }

  // What a key tile does in a launch.
  struct Part {
    bool exists;  // it has work in this launch; a key tile that no query sees has some in one, where it writes 0
    bool has_partial_sums;         // an earlier launch has left dK and dV
    bool is_last;                  // dK and dV are complete
    LoopOrder::Tiles query_tiles;  // over which it iterates
    int first_query_tile;          // the one that has index 0: cyclic, the first one of the chunk
    LoopOrder::Contributor contributor;
  };

  // of_all: the key tile without chunks. visible: the query tiles that see it. These go on to the sequence's last one,
  // because there are chunks only where no query's first keys are hidden (Visibility::left).
  FLASH_HOST_DEVICE Part part(int launch, const LoopOrder::Contributor& of_all, const LoopOrder::Tiles& visible) const {
    const int chunk = of_launch(launch, of_all.direction);
    const int end = LoopOrder::num_tiles(of_all.num_queries, LoopOrder::kQueries);
    const int last_chunk = end == 0 ? 0 : (end - 1) / tiles;
    const int first_chunk = least(visible.begin / tiles, last_chunk);
    const bool descends = of_all.direction == LoopDirection::kDescending;
    const bool exists = first_chunk <= chunk && chunk <= last_chunk;
    const LoopOrder::Tiles of_chunk = {least(chunk * tiles, end), least((chunk + 1) * tiles, end)};
    const int begin = visible.begin > of_chunk.begin ? visible.begin : of_chunk.begin;
    Part part = {exists,
                 exists && chunk != (descends ? last_chunk : first_chunk),
                 exists && chunk == (descends ? first_chunk : last_chunk),
                 {begin, least(visible.end, of_chunk.end)},
                 0,
                 of_all};
    if (of_all.direction != LoopDirection::kCyclic) return part;
    part.query_tiles = {begin - of_chunk.begin, part.query_tiles.end - of_chunk.begin};
    part.first_query_tile = of_chunk.begin;
    part.contributor.query_tiles = of_chunk.end - of_chunk.begin;
    part.contributor.num_queries =
        least(of_all.num_queries, of_chunk.end * LoopOrder::kQueries) - of_chunk.begin * LoopOrder::kQueries;
    return part;
  }

  // The number of leading key tiles that have work tiles in a launch.
  LoopOrder::KeyTiles key_tiles(const LoopOrder& order, const attention::AttentionParams& p, int launch) const {
    const auto of = [&](LoopDirection direction) {
      const int chunk = of_launch(launch, direction);
      const bool packed = p.sequences.cu_seqlens_q != nullptr;  // their lengths lie in a GPU's memory
      if (packed || chunk + 1 >= count) return order.tiles;
      const int last_query_tile = (chunk + 1) * tiles - 1;
      const LoopOrder::Contributor any = order.contributor(p.visibility, p.sequences.at(0), 0, direction);
      return static_cast<uint32_t>(any.contributors(last_query_tile).end);
    };
    return {of(LoopDirection::kAscending), of(LoopDirection::kDescending)};
  }

 private:
  FLASH_HOST_DEVICE int of_launch(int launch, LoopDirection direction) const {
    return direction == LoopDirection::kDescending ? count - 1 - launch : launch;
  }
  FLASH_HOST_DEVICE static int least(int x, int y) { return x < y ? x : y; }
};

}  // namespace flash_attn_ext
