// The tile sizes of Hopper's attention kernels, with their reasons, and which kernels there are.
#pragma once

#include "kernels/tile_config.h"

namespace flash_attn_ext::sm90 {

// Shared memory that a block may have on compute capability 9.0, where a multiprocessor has `blocks` of them: each
// takes 1 KiB for itself.
constexpr int shared_bytes(int blocks) { return (228 / blocks - 1) * 1024; }
inline constexpr int kSharedBytes = shared_bytes(1);

struct HeadDims {
  int qk;
  int v;
  bool operator==(const HeadDims&) const = default;
};

// Head dims that forward kernels are compiled for, the cheaper ones first. The tails of smaller ones are zeros. Blocks
// share a tile of queries where v is larger: each computes kColumns columns of O.
inline constexpr HeadDims kForwardHeadDims[] = {{64, 64},   {96, 96},   {128, 128}, {192, 128},
                                                {192, 192}, {128, 256}, {256, 256}};
inline constexpr int kColumns = 256;
inline constexpr int64_t kLargestHeadDimQk = 256;
inline constexpr int64_t kLargestHeadDimV = 2 * kColumns;

// Which kernels there are; the Extended one does everything. (H100, us, Extended kernels and those of head dim 256 for
// a mask or dropout, S 4096: 730 and 412, 735 and 545.)
constexpr bool has_forward_kernel(HeadDims dims, Variant variant) {
  if (variant == Variant::kPlain || variant == Variant::kExtended) return true;
  if (variant == Variant::kSmall) return dims == HeadDims{64, 64};
  if (variant == Variant::kShort) return dims == HeadDims{64, 64} || dims == HeadDims{128, 128};
  if (variant == Variant::kTall) return dims == HeadDims{96, 96} || dims == HeadDims{128, 128};
  if (dims.qk > 128 || dims.v > 128) return variant == Variant::kMask || variant == Variant::kDropout;
  return dims.qk == dims.v && (dims.qk == 64 || dims.qk == 128);
}

// The cheapest ones that a kernel of that variant is compiled for and that hold these; zeros: there are none. (H100, us
// at head dim 96, B2 H16 S4096, Extended kernels of 96 and others of 128: mask 676 and 423, bias 673 and 564, dropout
// 718 and 621; 128 queries of 4k keys, 16 heads, undivided at 96 and divided at 128: 49 and 25.)
constexpr HeadDims forward_head_dims(int64_t qk, int64_t v, Variant variant) {
  for (const HeadDims& dims : kForwardHeadDims) {
    if (qk <= dims.qk && (v <= dims.v || dims.v == kColumns) && has_forward_kernel(dims, variant)) return dims;
  }
  return {};
}

// Short calls at head dims up to 64, of up to so many queries and keys: tiles of this backend may be so empty that the
// portable kernels, several small blocks of which share a multiprocessor, are faster. They run instead of all Extended
// kernels, and in the cases that follow.
inline constexpr int64_t kShortTokens = 256;
// Scores are only scaled, for up to so many queries. (Backward: also where a bias of q's type has a gradient or a mask
// beside it.)
inline constexpr int64_t kPortableQueries = 128;
// Scores are only scaled, for up to so many visible keys, where AllKeys kernels do not run. (Forward.)
inline constexpr int64_t kPortableKeys = 96;
// Nothing else changes a score than a scale, a mask, a bias or dropout, for up to so many queries and keys. (Forward.)
inline constexpr int64_t kPortableTokens = 64;

// Up to how many queries reading the keys bounds a call, so that it is for the kernel that divides keys: with more,
// this backend's tiles are at least half full.
inline constexpr int64_t kQueriesBoundByKeys = 32;

// Longer causal calls of up to so many tokens, and windows of up to so many keys of more, take Small kernels: a tile of
// queries has so few tiles of keys that it is mostly its first and last products and its stores, of which two blocks
// hide each other's, and tiles at the edge of what is visible are half in vain. With more, what a warpgroup overlaps
// within itself counts for more. (H200, us, of Plain and of Small kernels: S 512 causal 137 and 117, full 167 and 165;
// S 1024 causal 201 and 177, full 81 and 87; S 2048 causal 296 and 295, full 492 and 536; S 8192, windows of 129, 257,
// 513, 1025 and 1537 keys 123 and 99, 152 and 128, 202 and 183, 298 and 290, 383 and 382.)
inline constexpr int64_t kSmallTokens = 1536;

// A forward block: 64 queries per warpgroup stay, tiles of `keys` stream past in stages of K and V. `query_stages`:
// with two, the next tile's Q arrives during this one.
struct ForwardTile {
  int warpgroups;  // that compute; one more starts the copies
  int keys;
  int query_stages;
  int key_stages = 2;
  int blocks = 1;           // on a multiprocessor
  bool overlaps = true;     // a warpgroup's own softmax and products
  bool takes_turns = true;  // warpgroups start their products in turn
};

// How many times smaller than the last one the sections of heads are that come before it (schedule.cuh), in calls of so
// many tiles of queries a head. In short ones keys are read for the first time as often as again. The longest tiles of
// many heads, one after the other, ask memory for more than it delivers, and those that follow for little: fewer heads
// at a time ask for as much all the time. The last section is as large as ever, so that a launch ends on the least
// work.
constexpr int64_t smaller_sections(int64_t query_tiles) { return query_tiles <= 8 ? 8 : 1; }

constexpr bool is_plain(Variant variant) {
  return variant == Variant::kPlain || variant == Variant::kParts || variant == Variant::kShort ||
         variant == Variant::kSmall || variant == Variant::kTall;
}

// Rows of head dims that are no multiples of 16 do not consist of whole sectors of 32 bytes, and copies of them, slower
// by a third, bound a call. Above head dim 64, calls of more keys than so many take Tall kernels, which copy K and V
// for half as many queries again. (H100, us, of Plain and of Tall kernels: D72 S 4096 474 and 360, S 729 292 and 228, S
// 256 55 and 58; D88 S 4096 524 and 386; D104 S 4096 539 and 407.)
inline constexpr int64_t kWholeSectors = 16;
inline constexpr int64_t kTallKeys = 256;
inline constexpr int64_t kTallKeysOneSided = 512;

// At head dims from 97 to 128, so do windows of up to so many keys, and calls of which one side alone is bounded, of
// more than 256 and up to so many tokens: tiles of 64 keys have less that is computed in vain at the edges of what is
// visible, and a warpgroup whose rows have ended goes on to the next tile while others compute. (By the time of Plain
// kernels, H100, B2 H16 S8192, windows to one side of 65, 257, 513, 1025, 2049 and 4097 keys 0.97, 0.95, 0.91, 0.93,
// 0.96, 0.98; H200, causal, 16384 rows of 16 heads, S 320, 512, 640, 768, 1024, 1536, 2048, 3072, 4096 0.87,
// 0.95, 1.01, 0.93, 1.00, 0.95, 0.97, 0.97, 0.99, few heads up to 1.04; longer ones 0.98, and 1.01 on an H100.)
inline constexpr int64_t kTallWindow = 4097;
inline constexpr int64_t kTallTokensOneSided = 4096;

// As many keys as S, P and O leave registers for: 160 per thread with three warpgroups, 232 with two. Three read K and
// V from shared memory for half as many rows again, which pays where exponentials are as slow as products (head dim
// 64) and there are many tiles: Short kernels have two, and the tiles of keys of those that they stand in for. Small
// ones have 104 registers, where two blocks share a multiprocessor: each one's softmax runs beside the other's
// products. Extended kernels have biases and masks in shared memory too, and draws of dropout for 32 keys at a time.
constexpr ForwardTile forward_tile(HeadDims dims, Variant variant) {
  const bool plain = is_plain(variant);
  if (variant == Variant::kSmall)
    return {.warpgroups = 2,
            .keys = 64,
            .query_stages = 2,
            .key_stages = 3,
            .blocks = 2,
            .overlaps = false,
            .takes_turns = false};
  if (variant == Variant::kTall && dims.v > 96)
    return {.warpgroups = 3, .keys = 64, .query_stages = 2, .key_stages = 3, .takes_turns = false};
  if (variant == Variant::kTall) return {.warpgroups = 3, .keys = 112, .query_stages = 2};
  if (variant == Variant::kShort && dims.v > 64)
    return {.warpgroups = 2, .keys = 64, .query_stages = 2, .key_stages = 4, .takes_turns = false};
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

// Of how many heads the last tiles, of fewer rows, come last where all tiles see the same keys (schedule.cuh). With 192
// rows the last one is often much less work. (H200, by the time of one head after the other, D64: S 512 0.99, S 577
// 0.96 to 0.99, S 1024 0.98, S 2048 0.98; other head dims, with 128 rows: 0.98 to 1.03.)
constexpr int64_t uneven_heads(const ForwardTile& tile, int64_t resident_blocks) {
  return tile.warpgroups == 3 ? resident_blocks / 4 : 1;
}

// The numbers of keys that AllKeys kernels are compiled for. A call takes the first that holds all of its keys.
inline constexpr HeadDims kAllKeysHeadDims = {64, 64};
inline constexpr int kAllKeys[] = {80, 96, 128, 160, 192, 208, 256};
inline constexpr int64_t kMostAllKeys = 256;
// Where one side alone is bounded, half of a tile is computed in vain, and Small kernels are faster with more.
inline constexpr int64_t kMostAllKeysOneSided = 160;

// The next smaller number, or 0: a call has more keys than that.
constexpr int all_keys_below(int keys) {
  int below = 0;
  for (const int other : kAllKeys) below = other < keys ? other : below;
  return below;
}

// An AllKeys block: a unit's keys stay in a stage, its tiles of 64 queries go to the warpgroups in turn. Four of these
// where S, and then P and O, fit 112 registers. 256 keys come in two parts, whose second one is multiplied by K while
// the first one is by V. A warpgroup that overlaps starts the next S before it writes O.
struct AllKeysTile {
  int warpgroups;  // that compute; one more starts the copies
  int key_stages;
  int query_stages = 2;  // of each warpgroup
  int parts = 1;
  bool overlaps = false;
};
constexpr AllKeysTile all_keys_tile(int keys) {
  if (keys <= 80) return {.warpgroups = 4, .key_stages = 6, .overlaps = true};
  if (keys <= 96) return {.warpgroups = 4, .key_stages = 4, .query_stages = 3, .overlaps = true};
  if (keys <= 128) return {.warpgroups = 4, .key_stages = 4};
  if (keys <= 160) return {.warpgroups = 3, .key_stages = 3};
  if (keys <= 192) return {.warpgroups = 3, .key_stages = 2, .overlaps = true};
  return {.warpgroups = 3, .key_stages = 2, .parts = keys <= 208 ? 1 : 2};
}

// What a row of queries costs a Short kernel, by what it costs the kernel that it stands in for: K and V are read for
// fewer rows. (H100: D128, windows of 513 and 4097 keys of 8192 and 16384 1.07 and 1.08; D104 S 4096, where copies
// bound the call, 1.3.)
constexpr double short_row_cost(HeadDims dims, bool has_whole_sectors) {
  if (dims.v <= 64) return 1.2;
  return has_whole_sectors ? 1.07 : 1.3;
}

// Whether a block gets as many registers as its warpgroups ask for: they share what each thread has when the kernel
// starts, a multiple of 8. (One that asks for more waits for ever.) blocks: on a multiprocessor.
constexpr bool has_registers(int warpgroups, int registers, int copy_registers, int blocks = 1) {
  const int at_start = 65536 / (128 * (warpgroups + 1) * blocks) / 8 * 8;
  return warpgroups * registers + copy_registers <= (warpgroups + 1) * at_start;
}

constexpr bool looks_up_mask(Variant variant) { return !is_plain(variant) && variant != Variant::kDropout; }

// Registers of a thread that computes, and of one that copies: together they fill the register file. A thread that
// copies needs more where it looks tiles of a mask up.
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
constexpr ForwardRegisters all_keys_registers(const AllKeysTile& tile) {
  return tile.warpgroups == 4 ? ForwardRegisters{.consumer = 112, .producer = 32}
                              : ForwardRegisters{.consumer = 160, .producer = 32};
}

// Head dims that the backward kernel is compiled for.
inline constexpr HeadDims kBackwardHeadDims[] = {{64, 64}, {96, 96}, {128, 128}};
inline constexpr int64_t kLargestBackwardHeadDim = 128;

constexpr HeadDims backward_head_dims(int64_t qk, int64_t v) {
  for (const HeadDims& dims : kBackwardHeadDims) {
    if (qk <= dims.qk && v <= dims.v) return dims;
  }
  return {};
}

// A backward block: 64 keys per computing warpgroup stay, tiles of 64 queries stream past. Stages in shared memory; at
// head dim 64 K and V are also held in registers, as left operands that shared memory does not have to deliver again.
struct BackwardTile {
  int query_stages;  // and as many of dS
  int key_stages;    // with two, the next tile's K and V arrive during this one
  bool keys_in_registers;
  int dq_columns;  // of a piece of dQ: as many as registers hold
};
constexpr BackwardTile backward_tile(HeadDims dims) {
  if (dims.qk <= 64) return {.query_stages = 3, .key_stages = 2, .keys_in_registers = true, .dq_columns = 64};
  return {.query_stages = 2, .key_stages = 1, .keys_in_registers = false, .dq_columns = dims.qk <= 96 ? 96 : 64};
}

// Short calls whose scores are only scaled: the portable kernels are faster up to so many queries, or queries and keys.
struct PortableBackward {
  int64_t queries;
  int64_t tokens;
};
// waves: tiles of keys for each multiprocessor, rounded up. (H200, by the time of the portable kernels. One: 128 tokens
// 1.01 to 1.18, 160 1.02 to 1.08, 192 0.85 to 0.94, 256 0.65. Two: 128 tokens 1.17 to 1.26, 192 and 224 1.05 to 1.16,
// 240 0.94. More: 64 tokens 1.20 to 1.36, 96 1.00 to 1.03, 128 0.77 to 0.95, 160 0.85 to 1.07, 197 0.73 to 0.89.)
constexpr PortableBackward portable_backward(int64_t waves) {
  if (waves > 2) return {.queries = 64, .tokens = 96};
  return {.queries = kPortableQueries, .tokens = waves > 1 ? 224 : 176};
}

// With more keys for each query than this, visitors of a tile of queries would wait for each other's turns. So phases
// of tiles of keys have sums of dQ of their own, as many as there are tiles of a pair that are worked on at once:
// visitors of the same sums hardly meet, and L2 still holds what they add to. With a mask, kernels in which nobody
// takes turns run instead.
inline constexpr int64_t kMostKeysPerQuery = 8;

// Up to how many query heads of a key head one block visits one after the other where tiles of keys see different
// numbers of queries. More than one saves adding up their dK and dV, but the blocks drift apart, and L2 does not hold
// what lies between them.
// (H200, 1, 2, 4, 8 heads of as many or more in a group, by the best: D128 S 512 1.45, 1.10, 1.05, 1.00, S 1024 1.09,
// 1.00, 1.01, 1.15, S 2048 1.00, 1.06, 1.18, 1.47; D64 S 512 1.18, 1.00, 1.00, 1.04, S 1024 1.16, 1.00, 1.10, 1.13,
// S 2048 1.05, 1.00, 1.22, 1.43.)
constexpr int64_t most_drifting_heads(HeadDims dims, int64_t query_tiles) {
  if (query_tiles <= 8) return dims.qk <= 64 ? 4 : 8;
  return query_tiles <= (dims.qk <= 64 ? 32 : 16) ? 2 : 1;
}

// What backward kernels for the same head dims differ in.
struct BackwardForm {
  Variant variant;
  // dQ of a visit is announced before it is computed, and the sums that a last visitor takes are fetched
  // (sm90/backward/dq_outlet.cuh); dQ is computed beside exponentials, and V awaited late.
  bool announces_visits;
  // The products S and dP take in the LSE and delta (tile/sm90/column_terms.h).
  bool adds_statistics;

  bool operator==(const BackwardForm&) const = default;
};

// What they are chosen by.
struct BackwardCall {
  Variant variant;
  int64_t query_tiles;  // of 64, of the longest sequence
  int64_t key_tiles;    // of 128
  bool cyclic;          // every query sees every key
};

// The faster one. Visits are announced where scores are only scaled. (H200, S 512, 2048, 8192: D128 causal takes 0.92,
// 0.94, 0.95 of the time, full 0.97, 0.99, 1.01, which memory for added statistics makes up for; D96 causal, 4096,
// 0.97, D64 1.00 to 1.07.) Statistics are added, but not where a bias comes to S before or dP is dropped before delta
// is taken off. They are four times as many bytes, which short calls wait for. (S 320, 512, 768, 2048, 4096: D64 full
// 1.06, 1.01, 0.96, 0.94, 0.94, causal 1.02, 1.01, 1.00, 0.97, 0.96; D96 full 0.98, 0.95, 0.93, 0.91, 0.90, causal
// 0.99, 0.99, 0.98, 0.96, 0.96; D128 full 1.00, 1.02, 1.00, 0.98, 0.96, causal 1.00, 1.00, 0.99, 0.99, 0.98. Few
// queries of many keys: D64 0.95 to 0.99, D128 1.00 to 1.01.)
inline constexpr int64_t kAddingQueryTiles = 9;
inline constexpr int64_t kAddingKeyTiles = 5;  // at head dim 64
constexpr bool adds_statistics(HeadDims dims, const BackwardCall& call) {
  if (call.variant == Variant::kMask) return dims.qk <= 96;
  if (call.variant != Variant::kPlain) return false;
  if (dims == HeadDims{96, 96} || call.query_tiles >= kAddingQueryTiles) return true;
  return dims.qk <= 64 && call.key_tiles >= kAddingKeyTiles;
}
constexpr BackwardForm backward_form(HeadDims dims, const BackwardCall& call) {
  const bool announces = call.variant == Variant::kPlain && (call.cyclic ? dims.qk > 96 : dims.qk > 64);
  return {call.variant, announces, adds_statistics(dims, call)};
}
constexpr bool has_backward_form(HeadDims dims, BackwardForm form) {
  for (const int64_t query_tiles : {int64_t{1}, kAddingQueryTiles}) {
    for (const bool cyclic : {false, true}) {
      if (backward_form(dims, {form.variant, query_tiles, 1, cyclic}) == form) return true;
    }
  }
  return false;
}

// How many times the tiles of a section's pairs that walk the same way (plan/visit_order.h) fill the GPU, at most. More
// even out where tiles differ; fewer leave less for L2 to hold. (H200, causal, by the time with 1: D64
// S 384, 512, 768, 1024, 2048, 8192 with 1.5 0.98, 0.97, 1.00, 1.01, 1.00, 0.99, with 2 0.98, 0.98, 1.02, 1.00, 0.98,
// 0.94; D96 S 512, 1024, 2048 with 2 1.02, 0.97, 0.95; D128 1.06, 1.00, 0.98.)
constexpr double section_waves(HeadDims dims, int64_t query_tiles) {
  if (query_tiles >= 16) return 2;
  return dims.qk <= 64 ? 1.5 : 1;
}

// Registers of a thread that copies, of one that computes dK and dV, and of one that computes dQ: 512 in all. More for
// copies gain 3 % at head dim 64 where all tiles go round, and lose as much at 128.
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
