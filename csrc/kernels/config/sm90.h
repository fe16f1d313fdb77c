// What Hopper's kernels are compiled for: which kernels there are, their tiles, stages, warpgroups and registers. The
// figures behind the constants are in docs/kernels/log/sm90.md and sm90_backward.md, under "Figures behind constants".
#pragma once

#include <initializer_list>

#include "kernels/config/sm80.h"

namespace flash_attn_ext::sm90 {

// The shared memory that a CTA may have on compute capability 9.0 with `blocks` CTAs per SM. Each CTA reserves 1 KiB.
constexpr int shared_bytes(int blocks) { return (228 / blocks - 1) * 1024; }
inline constexpr int kSharedBytes = shared_bytes(1);

struct HeadDims {
  int qk;
  int v;
  bool operator==(const HeadDims&) const = default;
};

// Head dims that forward kernels are compiled for, the cheapest first. Smaller ones are zero-padded. Where the head dim
// of v is larger, several CTAs share a tile of queries, and each computes kColumns columns of O.
inline constexpr HeadDims kForwardHeadDims[] = {{64, 64},   {96, 96},   {128, 128}, {192, 128},
                                                {192, 192}, {128, 256}, {256, 256}};
inline constexpr int kColumns = 256;
inline constexpr int64_t kLargestHeadDimQk = 256;
inline constexpr int64_t kLargestHeadDimV = 2 * kColumns;

// Which kernels there are. The Extended kernel does everything.
constexpr bool has_forward_kernel(HeadDims dims, Variant variant) {
  if (variant == Variant::kPlain || variant == Variant::kExtended) return true;
  if (variant == Variant::kSmall) return dims == HeadDims{64, 64};
  if (variant == Variant::kShort) return dims == HeadDims{64, 64} || dims == HeadDims{128, 128};
  if (variant == Variant::kTall) return dims == HeadDims{96, 96} || dims == HeadDims{128, 128};
  if (dims.qk > 128 || dims.v > 128) return variant == Variant::kMask || variant == Variant::kDropout;
  return dims.qk == dims.v && (dims.qk == 64 || dims.qk == 128);
}

// The cheapest head dims that hold these and that a kernel of that variant is compiled for; zeros where there are none.
constexpr HeadDims forward_head_dims(int64_t qk, int64_t v, Variant variant) {
  for (const HeadDims& dims : kForwardHeadDims) {
    if (qk <= dims.qk && (v <= dims.v || dims.v == kColumns) && has_forward_kernel(dims, variant)) return dims;
  }
  return {};
}

// The number of queries and keys of a short call at head dims up to 64. This backend's tiles may be so empty there that
// the portable kernels, which have several small CTAs per SM, are faster. They run instead of all Extended kernels, and
// in the following cases.
inline constexpr int64_t kShortTokens = 256;
// Up to this number of queries, where scores are only scaled; in the backward pass also where a bias of q's dtype has a
// gradient or comes with a mask.
inline constexpr int64_t kPortableQueries = 128;
// Up to this number of visible keys in the forward pass, where scores are only scaled and no single-tile kernel runs.
inline constexpr int64_t kPortableKeys = 96;
// Up to this number of queries and keys in the forward pass, with nothing but a scale, a mask, a bias or dropout.
inline constexpr int64_t kPortableTokens = 64;

// Up to this number of queries, reading the keys bounds a call, and the portable split-KV kernel runs. With more
// queries, this backend's tiles are at least half full.
inline constexpr int64_t kQueriesBoundByKeys = 32;

// Longer causal calls of up to this number of tokens, and windows of up to this number of keys in longer calls, take
// Small kernels. There a tile of queries has so few tiles of keys that prologue and epilogue dominate. Two CTAs per SM
// hide each other's, and small tiles waste less at the edges of the visible range. In longer calls the overlap within a
// warpgroup matters more.
inline constexpr int64_t kSmallTokens = 1536;

// The tile of a forward CTA: 64 stationary queries per consumer warpgroup, and tiles of `keys` that stream through the
// pipelines of K and V. With two query_stages the next work tile's Q arrives during this one.
struct ForwardTile {
  int warpgroups;  // consumers; the producer is one more
  int keys;
  int query_stages;
  int key_stages = 2;
  int blocks = 1;         // CTAs per SM
  bool overlaps = true;   // intra-warpgroup overlap of softmax and GEMMs
  bool ping_pong = true;  // ping-pong scheduling of the warpgroups
};

// By how much the L2 head groups before the last one are smaller than it (schedule.cuh), for a number of query tiles
// per head. In short calls most reads of K and V miss L2. Longest-first order over all heads makes the first wave
// memory-bound and the last one compute-bound, so heads are scheduled in small groups. The last group keeps its size,
// so that a launch ends on the shortest work tiles.
constexpr int64_t smaller_head_groups(int64_t query_tiles) { return query_tiles <= 8 ? 8 : 1; }

constexpr bool is_plain(Variant variant) {
  return variant == Variant::kPlain || variant == Variant::kSplitKv || variant == Variant::kShort ||
         variant == Variant::kSmall || variant == Variant::kTall;
}

// Rows of head dims that are no multiples of 16 do not consist of whole 32-byte sectors. TMA loads of such rows are
// slower and bound a call. Above head dim 64, calls of more than kTallKeys keys take Tall kernels, which load K and V
// once for 192 queries instead of 128.
inline constexpr int64_t kWholeSectors = 16;
inline constexpr int64_t kTallKeys = 256;
inline constexpr int64_t kTallKeysOneSided = 512;

// At head dims from 97 to 128, Tall kernels also run for windows of up to this number of keys, and for calls that are
// bounded on one side only and have more than 256 and up to this number of tokens. Their tiles of 64 keys waste less at
// the edges of the visible range, and a warpgroup whose rows are complete proceeds to the next work tile while the
// others compute.
inline constexpr int64_t kTallWindow = 4097;
inline constexpr int64_t kTallTokensOneSided = 4096;

// As many keys as registers hold beside S, P and O: a thread has 160 registers with three consumers, 232 with two.
// Three consumers share each read of K and V, which pays where exponentials are as slow as GEMMs (head dim 64) and
// tiles are many. Short kernels have two consumers, and the tiles of keys of the kernels that they stand in for. Small
// kernels have two CTAs per SM and 104 registers: the softmax of one CTA overlaps the GEMMs of the other. Extended
// kernels also hold biases and masks in shared memory, and draw dropout for 32 keys at a time.
constexpr ForwardTile forward_tile(HeadDims dims, Variant variant) {
  const bool plain = is_plain(variant);
  if (variant == Variant::kSmall)
    return {.warpgroups = 2,
            .keys = 64,
            .query_stages = 2,
            .key_stages = 3,
            .blocks = 2,
            .overlaps = false,
            .ping_pong = false};
  if (variant == Variant::kTall && dims.v > 96)
    return {.warpgroups = 3, .keys = 64, .query_stages = 2, .key_stages = 3, .ping_pong = false};
  if (variant == Variant::kTall) return {.warpgroups = 3, .keys = 112, .query_stages = 2};
  if (variant == Variant::kShort && dims.v > 64)
    return {.warpgroups = 2, .keys = 64, .query_stages = 2, .key_stages = 4, .ping_pong = false};
  if (variant == Variant::kShort) return {.warpgroups = 2, .keys = 128, .query_stages = 2};
  if (dims.v <= 64 && plain) return {.warpgroups = 3, .keys = 128, .query_stages = 2};
  if (variant == Variant::kExtended && dims.qk <= 128 && dims.v <= 128)
    return {.warpgroups = 2, .keys = 96, .query_stages = 1};
  if (dims.qk <= 128 && dims.v <= 128)
    return {.warpgroups = 2, .keys = 128, .query_stages = variant == Variant::kBiasMask ? 1 : 2};
  if (!plain) return {.warpgroups = 2, .keys = 64, .query_stages = 1};
  if (dims.v <= 128) return {.warpgroups = 2, .keys = 112, .query_stages = 1};
  if (dims.v <= 192) return {.warpgroups = 2, .keys = 96, .query_stages = 1};
  return {.warpgroups = 2, .keys = dims.qk <= 128 ? 80 : 64, .query_stages = 1};
}

// For how many heads the last tiles, which have fewer rows, are scheduled last where all tiles see the same keys
// (schedule.cuh). With 192 rows the last tile is often much less work.
constexpr int64_t uneven_heads(const ForwardTile& tile, int64_t persistent_ctas) {
  return tile.warpgroups == 3 ? persistent_ctas / 4 : 1;
}

// The numbers of keys that single-tile kernels are compiled for. A call takes the first that holds all of its keys.
inline constexpr HeadDims kSingleTileHeadDims = {64, 64};
inline constexpr int kSingleTile[] = {80, 96, 128, 160, 192, 208, 256};
inline constexpr int64_t kMostKeysOfSingleTile = 256;
// Where only one side is bounded, half of a tile is masked, and with more keys Small kernels are faster.
inline constexpr int64_t kMostKeysOfSingleTileOneSided = 160;

// The next smaller number, or 0. A call of this kernel has more keys than that.
constexpr int single_tile_below(int keys) {
  int below = 0;
  for (const int other : kSingleTile) below = other < keys ? other : below;
  return below;
}

// The shape of a single-tile CTA. The keys of a work tile stay in one stage, and its tiles of 64 queries go to the
// consumers round-robin. There are four consumers where S, and then P and O, fit 112 registers. 256 keys are two parts,
// so that the QK GEMM of the second part overlaps the PV GEMM of the first. With overlap a warpgroup issues the next S
// before it stores O.
struct SingleTileShape {
  int warpgroups;  // consumers; the producer is one more
  int key_stages;
  int query_stages = 2;  // per consumer
  int parts = 1;
  bool overlaps = false;
};
constexpr SingleTileShape single_tile_shape(int keys) {
  if (keys <= 80) return {.warpgroups = 4, .key_stages = 6, .overlaps = true};
  if (keys <= 96) return {.warpgroups = 4, .key_stages = 4, .query_stages = 3, .overlaps = true};
  if (keys <= 128) return {.warpgroups = 4, .key_stages = 4};
  if (keys <= 160) return {.warpgroups = 3, .key_stages = 3};
  if (keys <= 192) return {.warpgroups = 3, .key_stages = 2, .overlaps = true};
  return {.warpgroups = 3, .key_stages = 2, .parts = keys <= 208 ? 1 : 2};
}

// The cost of a row of queries in a Short kernel, relative to the kernel that it stands in for: fewer rows share a read
// of K and V.
constexpr double short_row_cost(HeadDims dims, bool has_whole_sectors) {
  if (dims.v <= 64) return 1.2;
  return has_whole_sectors ? 1.07 : 1.3;
}

// Whether a CTA has as many registers as its warpgroups acquire. They share the registers that each thread has when the
// kernel starts, a multiple of 8; a warpgroup that acquires more would wait forever. blocks: CTAs per SM.
constexpr bool has_registers(int warpgroups, int registers, int copy_registers, int blocks = 1) {
  const int at_start = 65536 / (128 * (warpgroups + 1) * blocks) / 8 * 8;
  return warpgroups * registers + copy_registers <= (warpgroups + 1) * at_start;
}

constexpr bool looks_up_mask(Variant variant) { return !is_plain(variant) && variant != Variant::kDropout; }

// Registers of a consumer thread and of a producer thread; together they fill the register file. The producer needs
// more where it looks up the tiles of a mask.
struct ForwardRegisters {
  int consumer;
  int producer;
};
constexpr ForwardRegisters forward_registers(const ForwardTile& tile, Variant variant) {
  if (tile.blocks == 2) return {.consumer = 104, .producer = 32};
  if (tile.warpgroups == 3) return {.consumer = 160, .producer = 32};
  if (looks_up_mask(variant)) return {.consumer = 216, .producer = 72};
  return {.consumer = 232, .producer = 40};
}
constexpr ForwardRegisters single_tile_registers(const SingleTileShape& tile) {
  return tile.warpgroups == 4 ? ForwardRegisters{.consumer = 112, .producer = 32}
                              : ForwardRegisters{.consumer = 160, .producer = 32};
}

// Head dims that the key-stationary backward is compiled for.
inline constexpr HeadDims kBackwardHeadDims[] = {{64, 64}, {96, 96}, {128, 128}};
inline constexpr int64_t kLargestBackwardHeadDim = 128;

constexpr HeadDims backward_head_dims(int64_t qk, int64_t v) {
  for (const HeadDims& dims : kBackwardHeadDims) {
    if (qk <= dims.qk && v <= dims.v) return dims;
  }
  return {};
}

// The tile of a key-stationary backward CTA: 64 stationary keys per key warpgroup, and tiles of 64 queries that stream
// through pipelines. At head dim 64, K and V are also held in registers as left operands, which saves shared-memory
// bandwidth.
struct BackwardTile {
  int query_stages;  // also the stages of dS
  int key_stages;    // with two, the next work tile's K and V arrive during this one
  bool keys_in_registers;
  int dq_columns;  // columns of dQ that registers hold at a time
};
constexpr BackwardTile backward_tile(HeadDims dims) {
  if (dims.qk <= 64) return {.query_stages = 3, .key_stages = 2, .keys_in_registers = true, .dq_columns = 64};
  return {.query_stages = 2, .key_stages = 1, .keys_in_registers = false, .dq_columns = dims.qk <= 96 ? 96 : 64};
}

// Up to these numbers of queries, or of queries and keys, the portable kernels are faster where scores are only scaled.
struct PortableBackward {
  int64_t queries;
  int64_t tokens;
};
// waves: tiles of keys per SM, rounded up.
constexpr PortableBackward portable_backward(int64_t waves) {
  if (waves > 2) return {.queries = 64, .tokens = 96};
  return {.queries = kPortableQueries, .tokens = waves > 1 ? 224 : 176};
}

// With more keys per query than this, the contributors of a tile of queries would wait on its dQ semaphore. Phases of
// key tiles then have dQ accumulators of their own, as many as a pair has key tiles in flight, so that contributors to
// the same accumulator rarely overlap, and L2 still holds it. With a mask, kernels without semaphores run instead.
inline constexpr int64_t kMostKeysPerQuery = 8;

// Up to how many query heads of a KV group one CTA loops over where tiles of keys see different numbers of queries.
// More than one saves the sum of their dK and dV, but the CTAs drift apart, and L2 no longer holds what they share.
constexpr int64_t most_drifting_heads(HeadDims dims, int64_t query_tiles) {
  if (query_tiles <= 8) return dims.qk <= 64 ? 4 : 8;
  return query_tiles <= (dims.qk <= 64 ? 32 : 16) ? 2 : 1;
}

// What distinguishes key-stationary backward kernels of the same head dims.
struct BackwardForm {
  Variant variant;
  // dQ is pre-signalled: the reducer warp hears of a partial dQ before it is computed, and TMA fetches the accumulated
  // dQ for the last contributor (sm90/backward/key_stationary/dq_epilogue.cuh). The dQ GEMM then overlaps exponentials,
  // and V is waited for late.
  bool pre_signals_dq;
  // The GEMMs S and dP add the LSE and delta as augmented columns (tile/sm90/augmented_columns.h).
  bool adds_statistics;

  bool operator==(const BackwardForm&) const = default;
};

// What the form is chosen by.
struct BackwardCall {
  Variant variant;
  int64_t query_tiles;  // of 64, of the longest sequence
  int64_t key_tiles;    // of 128
  bool cyclic;          // every query sees every key, so the loop order is cyclic
};

// The fastest form. dQ is pre-signalled where scores are only scaled. Augmented columns are used except where a bias is
// added to S first, or where dP is dropped before delta is subtracted. They take four times the bytes of the
// statistics, which short calls would wait for.
inline constexpr int64_t kAddingQueryTiles = 9;
inline constexpr int64_t kAddingKeyTiles = 5;  // at head dim 64
constexpr bool adds_statistics(HeadDims dims, const BackwardCall& call) {
  if (call.variant == Variant::kMask) return dims.qk <= 96;
  if (call.variant != Variant::kPlain) return false;
  if (dims == HeadDims{96, 96} || call.query_tiles >= kAddingQueryTiles) return true;
  return dims.qk <= 64 && call.key_tiles >= kAddingKeyTiles;
}
constexpr BackwardForm backward_form(HeadDims dims, const BackwardCall& call) {
  const bool pre_signals = call.variant == Variant::kPlain && (call.cyclic ? dims.qk > 96 : dims.qk > 64);
  return {call.variant, pre_signals, adds_statistics(dims, call)};
}
constexpr bool has_backward_form(HeadDims dims, BackwardForm form) {
  for (const int64_t query_tiles : {int64_t{1}, kAddingQueryTiles}) {
    for (const bool cyclic : {false, true}) {
      if (backward_form(dims, {form.variant, query_tiles, 1, cyclic}) == form) return true;
    }
  }
  return false;
}

// How many waves the key tiles of an L2 head group in one loop direction (schedule/loop_order.h) fill at most. More
// waves balance tiles of different length; fewer keep more of the group in L2.
constexpr double head_group_waves(HeadDims dims, int64_t query_tiles) {
  if (query_tiles >= 16) return 2;
  return dims.qk <= 64 ? 1.5 : 1;
}

// Registers of a thread of the producer, of a key warpgroup and of the dQ warpgroup: 512 together with two key
// warpgroups.
struct BackwardRegisters {
  int copy;
  int key;
  int query;
};
constexpr BackwardRegisters backward_registers(HeadDims dims) {
  if (dims.qk <= 64) return {.copy = 32, .key = 208, .query = 64};
  if (dims.qk <= 96) return {.copy = 24, .key = 200, .query = 88};
  return {.copy = 24, .key = 208, .query = 72};
}

}  // namespace flash_attn_ext::sm90
