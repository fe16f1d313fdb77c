// The table of Hopper's forward kernels: each row is compiled once for bfloat16 and once for float16. The plan names a
// row, and the launch looks nothing up again. The figures behind the rows are in docs/kernels/log/sm90.md, under
// "Figures behind constants".
#pragma once

#include <cstddef>
#include <iterator>

#include "kernels/config/sm90.h"
#include "kernels/config/tables.h"

namespace flash_attn_ext::sm90 {

// Where the head dim of v is larger than this, several CTAs share a tile of queries, and each computes this many
// columns of O.
inline constexpr int kColumns = 256;
inline constexpr int64_t kLargestHeadDimQk = 576;
inline constexpr int64_t kLargestHeadDimV = 2 * kColumns;

// What a row can do beside its score mode. Each kind is instantiated in files of its own.
enum class RowKind {
  kPlain,
  kRowMax,   // they write row_max
  kKvCache,  // they may read a cache, and pack heads
};

// A CTA has 64 stationary queries per consumer warpgroup. Tiles of `block_n` keys stream through pipelines of K and V.
struct ForwardConfig {
  HeadDims dims;
  ScoreMode score = ScoreMode::kScaleOnly;
  int warpgroups;             // consumers; the producer is one more
  int block_n;                // keys of a tile
  int q_stages = 1;           // with two, the next work tile's Q arrives during this one
  int kv_stages = 2;          // stages of K, and as many of V
  int ctas_per_sm = 1;        // with two, the softmax of one CTA overlaps the GEMMs of the other
  bool ping_pong = true;      // ping-pong scheduling of the warpgroups
  bool intra_overlap = true;  // issues S of the next tile before it waits for the PV GEMM of this one
  bool split_kv = false;      // several CTAs share the keys of a query tile
  // TMA stores O, which is staged in its rows of Q. With one stage of Q the next work tile would have to wait for the
  // store. With dropout or a mask it is slower, since ptxas then gives the GEMMs fewer uniform registers.
  bool tma_store = false;
  // Computes the LSE and the factors of O while the last GEMM is in flight. With three warpgroups the GEMMs of the
  // others hide them already, and registers are short.
  bool early_lse = false;
  // Releases Q after the last S of a work tile rather than after its last softmax, so that the load of the next queries
  // starts earlier.
  bool early_q_release = false;
  // Waits for the PV GEMM after a quarter of a tile's exponentials. Elsewhere ptxas moves the wait ahead of them, where
  // it is best in most kernels (docs/kernels/log/sm90.md, "When O is awaited"); with dropout, after all of them and the
  // draws.
  bool late_pv_wait = false;
  // Has a mainloop of its own for tiles of keys without masked scores. With three warpgroups, or more columns of O, a
  // single loop is as fast.
  bool unmasked_loop = false;
  // Divides O by the sums of the rounded P. The exponents may then be relative to a stale row maximum (the rescale
  // threshold). Without these sums the threshold is 0: a dominant weight must be exactly 1, or its own rounding error
  // reaches O. With dropout the sums cover the kept weights, and the divisor is scaled by the ratio of all
  // weights to the kept ones.
  bool rounded_sums = false;
  // Writes row_max, the largest score of each row, where a call wants it. Kernels that read a bias always can. Other
  // kernels have rows of their own for it, so that calls that do not want it pay nothing.
  bool row_max = false;
  // K and V may be a cache: rows of its entries or pages, which the producers look up, and as many keys as its lengths
  // say. Calls without a cache take such a row to pack heads.
  bool kv_cache = false;

  // Of rows for ALiBi, those whose queries may see later keys: all that have a mask, too. Iteration begins at the last
  // keys, far from the diagonal, so the maximum of that tile would be too low, and the row maximum follows the scores.
  bool later_keys = false;

  // Whether calls of these head dims can take the row. Smaller ones are zero-padded.
  constexpr bool takes(int64_t head_dim_qk, int64_t head_dim_v) const {
    return head_dim_qk <= dims.qk && (head_dim_v <= dims.v || dims.v == kColumns);
  }
  // Whether query heads that share a key head may be rows of the same tiles (attention/packed_heads.h).
  constexpr bool may_pack_heads() const { return kv_cache && (tma_store || split_kv); }
  constexpr int block_m() const { return 64 * warpgroups; }  // queries of a tile
  constexpr bool has_bias() const { return score == ScoreMode::kGeneric || reads_bias_boxes(score); }
  constexpr bool has_key_bias() const { return score == ScoreMode::kKeyBias || score == ScoreMode::kKeyBiasDropout; }
  constexpr bool has_bias_or_mask() const { return has_bias() || has_mask(score); }
  // In a call with KeyIntervals, kernels without a mask or a key bias compute the batch entries that have one, and
  // kernels for which this is true compute the rest.
  constexpr bool takes_entries_without_interval() const { return has_bias_or_mask() || has_key_bias(); }
  // Whether scores are final before the softmax. Elsewhere it multiplies q.k by the scale. A key bias is divided by the
  // scale, and the QK GEMM adds it.
  constexpr bool modifies_scores() const { return has_bias() || caps_scores(score) || adds_alibi(score); }
  // Whether a call that needs a kind of row can take this one. Kernels that read a bias write row_max where it is
  // wanted.
  constexpr bool suits(RowKind wanted) const { return kind() == wanted || (has_bias() && wanted != RowKind::kKvCache); }
  constexpr RowKind kind() const { return kv_cache ? RowKind::kKvCache : row_max ? RowKind::kRowMax : RowKind::kPlain; }
  // other: a row of the same head dims and score mode.
  constexpr bool differs_in_tiles_only(const ForwardConfig& other) const {
    return kind() == other.kind() && split_kv == other.split_kv && later_keys == other.later_keys;
  }
  constexpr bool may_drop() const { return score == ScoreMode::kGeneric || always_drops(score); }

  bool operator==(const ForwardConfig&) const = default;
};

// The registers for S, P and O limit the keys of a tile (forward_registers). Rows of one score mode stand in the order
// of their head dims, the cheapest first, and a call takes the first one that holds its own. Of rows with the same head
// dims and score mode, the first is the default; plan/sm90/forward.cpp says when another one is faster.
// clang-format off
inline constexpr ForwardConfig kForwardConfigs[] = {
    // Three consumers share each read of K and V, which pays where exponentials are as slow as GEMMs and tiles are
    // many.
    {.dims = {64, 64}, .warpgroups = 3, .block_n = 128, .q_stages = 2, .tma_store = true, .rounded_sums = true},
    // The same tiles of keys, and so the same bits, with fewer queries: fills the GPU more evenly where tiles are few.
    {.dims = {64, 64}, .warpgroups = 2, .block_n = 128, .q_stages = 2, .tma_store = true, .early_lse = true,
     .late_pv_wait = true, .unmasked_loop = true, .rounded_sums = true},
    // Two CTAs per SM, with 104 registers a thread: they hide each other's prologue and epilogue, and small tiles waste
    // less at the edges of the visible range.
    {.dims = {64, 64}, .warpgroups = 2, .block_n = 64, .q_stages = 2, .kv_stages = 3, .ctas_per_sm = 2,
     .ping_pong = false, .intra_overlap = false, .tma_store = true, .rounded_sums = true},
    {.dims = {64, 64}, .warpgroups = 3, .block_n = 128, .q_stages = 2, .split_kv = true, .rounded_sums = true},
    {.dims = {64, 64}, .warpgroups = 3, .block_n = 128, .q_stages = 2, .tma_store = true, .rounded_sums = true,
     .kv_cache = true},
    {.dims = {64, 64}, .warpgroups = 2, .block_n = 128, .q_stages = 2, .tma_store = true, .early_lse = true,
     .late_pv_wait = true, .unmasked_loop = true, .rounded_sums = true, .kv_cache = true},
    {.dims = {64, 64}, .warpgroups = 3, .block_n = 128, .q_stages = 2, .split_kv = true, .rounded_sums = true,
     .kv_cache = true},
    {.dims = {64, 64}, .warpgroups = 3, .block_n = 128, .q_stages = 2, .tma_store = true, .rounded_sums = true,
     .row_max = true},
    {.dims = {64, 64}, .warpgroups = 2, .block_n = 128, .q_stages = 2, .tma_store = true, .early_lse = true,
     .late_pv_wait = true, .unmasked_loop = true, .rounded_sums = true, .row_max = true},
    {.dims = {64, 64}, .warpgroups = 2, .block_n = 64, .q_stages = 2, .kv_stages = 3, .ctas_per_sm = 2,
     .ping_pong = false, .intra_overlap = false, .tma_store = true, .rounded_sums = true, .row_max = true},
    // At head dims 80 and 96 the sums cannot be of rounded P: the tile of V has no room for columns of ones, and
    // additions instead are slower in float16 (docs/kernels/log/sm90.md, "Sums of rounded weights by additions").
    // The first row of head dim 80 has the key tiles of the (96, 96) kernel that writes row_max, and so its bits.
    {.dims = {80, 80}, .warpgroups = 2, .block_n = 128, .q_stages = 2, .tma_store = true, .early_lse = true,
     .unmasked_loop = true},
    {.dims = {80, 80}, .warpgroups = 3, .block_n = 112, .q_stages = 2, .tma_store = true},
    {.dims = {80, 80}, .warpgroups = 2, .block_n = 112, .q_stages = 2, .tma_store = true, .early_lse = true,
     .unmasked_loop = true},
    {.dims = {96, 96}, .warpgroups = 2, .block_n = 128, .q_stages = 2, .tma_store = true, .early_lse = true,
     .unmasked_loop = true},
    // More queries for each load of K and V, where the loads bound a call.
    {.dims = {96, 96}, .warpgroups = 3, .block_n = 112, .q_stages = 2, .tma_store = true},
    // The same tiles of keys with fewer queries.
    {.dims = {96, 96}, .warpgroups = 2, .block_n = 112, .q_stages = 2, .tma_store = true, .early_lse = true,
     .unmasked_loop = true},
    {.dims = {96, 96}, .warpgroups = 2, .block_n = 128, .q_stages = 2, .tma_store = true, .early_lse = true,
     .unmasked_loop = true, .row_max = true},
    {.dims = {128, 128}, .warpgroups = 2, .block_n = 128, .q_stages = 2, .tma_store = true, .early_lse = true,
     .unmasked_loop = true, .rounded_sums = true},
    // Small tiles of keys, and no ping-pong: a warpgroup whose rows are complete proceeds to the next work tile while
    // the others compute.
    {.dims = {128, 128}, .warpgroups = 3, .block_n = 64, .q_stages = 2, .kv_stages = 3, .ping_pong = false,
     .tma_store = true, .late_pv_wait = true, .rounded_sums = true},
    // The same with fewer queries.
    {.dims = {128, 128}, .warpgroups = 2, .block_n = 64, .q_stages = 2, .kv_stages = 4, .ping_pong = false,
     .tma_store = true, .early_lse = true, .late_pv_wait = true, .unmasked_loop = true, .rounded_sums = true},
    {.dims = {128, 128}, .warpgroups = 2, .block_n = 128, .q_stages = 2, .split_kv = true, .unmasked_loop = true,
     .rounded_sums = true},
    {.dims = {128, 128}, .warpgroups = 2, .block_n = 128, .q_stages = 2, .tma_store = true, .early_lse = true,
     .unmasked_loop = true, .rounded_sums = true, .kv_cache = true},
    {.dims = {128, 128}, .warpgroups = 2, .block_n = 128, .q_stages = 2, .split_kv = true, .unmasked_loop = true,
     .rounded_sums = true, .kv_cache = true},
    {.dims = {128, 128}, .warpgroups = 2, .block_n = 128, .q_stages = 2, .tma_store = true, .early_lse = true,
     .unmasked_loop = true, .rounded_sums = true, .row_max = true},
    {.dims = {128, 128}, .warpgroups = 3, .block_n = 64, .q_stages = 2, .kv_stages = 3, .ping_pong = false,
     .tma_store = true, .late_pv_wait = true, .rounded_sums = true, .row_max = true},
    {.dims = {128, 128}, .warpgroups = 2, .block_n = 64, .q_stages = 2, .kv_stages = 4, .ping_pong = false,
     .tma_store = true, .early_lse = true, .late_pv_wait = true, .unmasked_loop = true, .rounded_sums = true,
     .row_max = true},
    {.dims = {192, 128}, .warpgroups = 2, .block_n = 112, .early_lse = true, .early_q_release = true,
     .unmasked_loop = true, .rounded_sums = true},
    {.dims = {192, 128}, .warpgroups = 2, .block_n = 112, .early_lse = true, .early_q_release = true,
     .unmasked_loop = true, .rounded_sums = true, .row_max = true},
    {.dims = {192, 192}, .warpgroups = 2, .block_n = 96, .early_lse = true, .early_q_release = true,
     .rounded_sums = true},
    {.dims = {128, 256}, .warpgroups = 2, .block_n = 80, .early_lse = true, .early_q_release = true,
     .rounded_sums = true},
    {.dims = {256, 256}, .warpgroups = 2, .block_n = 64, .early_lse = true, .early_q_release = true,
     .rounded_sums = true},
    {.dims = {256, 256}, .warpgroups = 2, .block_n = 64, .early_lse = true, .early_q_release = true,
     .rounded_sums = true, .kv_cache = true},
    {.dims = {256, 256}, .warpgroups = 2, .block_n = 64, .split_kv = true, .early_q_release = true,
     .rounded_sums = true, .kv_cache = true},
    {.dims = {256, 256}, .warpgroups = 2, .block_n = 64, .early_lse = true, .early_q_release = true,
     .rounded_sums = true, .row_max = true},
    // Shared memory has no room for columns of ones beside Q. Other score modes take the portable kernels above head dim
    // 256.
    {.dims = {512, 256}, .warpgroups = 2, .block_n = 32, .early_lse = true, .early_q_release = true},
    // Beside Q shared memory holds two stages of 16 keys, or one of 48, for which S reads Q a third as often. Both
    // warpgroups wait for K of the next tile, so neither ping-pong nor S ahead would overlap anything.
    {.dims = {576, 256}, .warpgroups = 2, .block_n = 48, .kv_stages = 1, .ping_pong = false, .intra_overlap = false,
     .early_lse = true, .early_q_release = true},

    // Dropout is drawn for 32 keys at a time.
    {.dims = {64, 64}, .score = ScoreMode::kDropout, .warpgroups = 2, .block_n = 128, .q_stages = 2,
     .rounded_sums = true},
    {.dims = {128, 128}, .score = ScoreMode::kDropout, .warpgroups = 2, .block_n = 128, .q_stages = 2,
     .rounded_sums = true},
    {.dims = {192, 128}, .score = ScoreMode::kDropout, .warpgroups = 2, .block_n = 64, .rounded_sums = true},
    {.dims = {192, 192}, .score = ScoreMode::kDropout, .warpgroups = 2, .block_n = 64, .rounded_sums = true},
    {.dims = {128, 256}, .score = ScoreMode::kDropout, .warpgroups = 2, .block_n = 64, .rounded_sums = true},
    {.dims = {256, 256}, .score = ScoreMode::kDropout, .warpgroups = 2, .block_n = 64, .rounded_sums = true},

    {.dims = {64, 64}, .score = ScoreMode::kMask, .warpgroups = 2, .block_n = 128, .q_stages = 2,
     .rounded_sums = true},
    {.dims = {64, 64}, .score = ScoreMode::kMask, .warpgroups = 2, .block_n = 128, .q_stages = 2,
     .rounded_sums = true, .row_max = true},
    // For lists of blocks of 64 keys.
    {.dims = {64, 64}, .score = ScoreMode::kMask, .warpgroups = 2, .block_n = 64, .q_stages = 2, .kv_stages = 4,
     .ping_pong = false, .rounded_sums = true},
    {.dims = {128, 128}, .score = ScoreMode::kMask, .warpgroups = 2, .block_n = 128, .q_stages = 2,
     .rounded_sums = true},
    {.dims = {128, 128}, .score = ScoreMode::kMask, .warpgroups = 2, .block_n = 128, .q_stages = 2,
     .rounded_sums = true, .row_max = true},
    {.dims = {128, 128}, .score = ScoreMode::kMask, .warpgroups = 2, .block_n = 64, .q_stages = 2, .kv_stages = 4,
     .ping_pong = false, .rounded_sums = true},
    {.dims = {192, 128}, .score = ScoreMode::kMask, .warpgroups = 2, .block_n = 64, .rounded_sums = true},
    {.dims = {192, 128}, .score = ScoreMode::kMask, .warpgroups = 2, .block_n = 64, .rounded_sums = true,
     .row_max = true},
    {.dims = {192, 192}, .score = ScoreMode::kMask, .warpgroups = 2, .block_n = 64, .rounded_sums = true},
    {.dims = {128, 256}, .score = ScoreMode::kMask, .warpgroups = 2, .block_n = 64, .rounded_sums = true},
    {.dims = {256, 256}, .score = ScoreMode::kMask, .warpgroups = 2, .block_n = 64, .rounded_sums = true},
    {.dims = {256, 256}, .score = ScoreMode::kMask, .warpgroups = 2, .block_n = 64, .rounded_sums = true,
     .row_max = true},

    {.dims = {64, 64}, .score = ScoreMode::kMaskDropout, .warpgroups = 2, .block_n = 128, .q_stages = 2,
     .rounded_sums = true},
    {.dims = {128, 128}, .score = ScoreMode::kMaskDropout, .warpgroups = 2, .block_n = 128, .q_stages = 2,
     .rounded_sums = true},

    {.dims = {64, 64}, .score = ScoreMode::kSoftcap, .warpgroups = 2, .block_n = 128, .q_stages = 2,
     .tma_store = true, .early_lse = true, .unmasked_loop = true, .rounded_sums = true},
    {.dims = {128, 128}, .score = ScoreMode::kSoftcap, .warpgroups = 2, .block_n = 128, .q_stages = 2,
     .tma_store = true, .early_lse = true, .unmasked_loop = true, .rounded_sums = true},
    {.dims = {256, 256}, .score = ScoreMode::kSoftcap, .warpgroups = 2, .block_n = 64, .early_lse = true,
     .early_q_release = true, .rounded_sums = true},

    {.dims = {64, 64}, .score = ScoreMode::kSoftcapMask, .warpgroups = 2, .block_n = 128, .q_stages = 2,
     .rounded_sums = true},
    {.dims = {128, 128}, .score = ScoreMode::kSoftcapMask, .warpgroups = 2, .block_n = 128, .q_stages = 2,
     .rounded_sums = true},

    {.dims = {64, 64}, .score = ScoreMode::kAlibi, .warpgroups = 3, .block_n = 128, .q_stages = 2,
     .tma_store = true, .rounded_sums = true},
    {.dims = {64, 64}, .score = ScoreMode::kAlibi, .warpgroups = 2, .block_n = 128, .q_stages = 2,
     .tma_store = true, .early_lse = true, .unmasked_loop = true, .rounded_sums = true},
    {.dims = {64, 64}, .score = ScoreMode::kAlibi, .warpgroups = 3, .block_n = 128, .q_stages = 2,
     .tma_store = true, .rounded_sums = true, .later_keys = true},
    {.dims = {64, 64}, .score = ScoreMode::kAlibi, .warpgroups = 2, .block_n = 128, .q_stages = 2,
     .tma_store = true, .early_lse = true, .unmasked_loop = true, .rounded_sums = true, .later_keys = true},
    {.dims = {128, 128}, .score = ScoreMode::kAlibi, .warpgroups = 2, .block_n = 128, .q_stages = 2,
     .tma_store = true, .early_lse = true, .unmasked_loop = true, .rounded_sums = true},
    {.dims = {128, 128}, .score = ScoreMode::kAlibi, .warpgroups = 2, .block_n = 128, .q_stages = 2,
     .tma_store = true, .early_lse = true, .unmasked_loop = true, .rounded_sums = true, .later_keys = true},
    {.dims = {64, 64}, .score = ScoreMode::kAlibiMask, .warpgroups = 2, .block_n = 128, .q_stages = 2,
     .rounded_sums = true, .later_keys = true},
    {.dims = {128, 128}, .score = ScoreMode::kAlibiMask, .warpgroups = 2, .block_n = 128, .q_stages = 2,
     .rounded_sums = true, .later_keys = true},

    {.dims = {64, 64}, .score = ScoreMode::kKeyBias, .warpgroups = 3, .block_n = 128, .q_stages = 2,
     .tma_store = true, .rounded_sums = true},
    {.dims = {64, 64}, .score = ScoreMode::kKeyBias, .warpgroups = 2, .block_n = 128, .q_stages = 2,
     .tma_store = true, .early_lse = true, .late_pv_wait = true, .unmasked_loop = true, .rounded_sums = true},
    {.dims = {64, 64}, .score = ScoreMode::kKeyBias, .warpgroups = 2, .block_n = 128, .q_stages = 2,
     .tma_store = true, .early_lse = true, .late_pv_wait = true, .unmasked_loop = true, .rounded_sums = true,
     .row_max = true},
    // At head dim 128 shared memory has no room for columns of ones.
    {.dims = {128, 128}, .score = ScoreMode::kKeyBias, .warpgroups = 2, .block_n = 128, .q_stages = 2,
     .tma_store = true, .early_lse = true, .unmasked_loop = true},
    {.dims = {128, 128}, .score = ScoreMode::kKeyBias, .warpgroups = 2, .block_n = 128, .q_stages = 2,
     .tma_store = true, .early_lse = true, .unmasked_loop = true, .row_max = true},
    {.dims = {64, 64}, .score = ScoreMode::kKeyBiasDropout, .warpgroups = 2, .block_n = 128, .q_stages = 2,
     .rounded_sums = true},
    {.dims = {128, 128}, .score = ScoreMode::kKeyBiasDropout, .warpgroups = 2, .block_n = 128, .q_stages = 2},

    // Shared memory holds tiles of the bias beside one stage of Q.
    {.dims = {64, 64}, .score = ScoreMode::kBiasMask, .warpgroups = 2, .block_n = 128, .row_max = true},
    {.dims = {128, 128}, .score = ScoreMode::kBiasMask, .warpgroups = 2, .block_n = 128, .row_max = true},
    {.dims = {64, 64}, .score = ScoreMode::kBiasMaskDropout, .warpgroups = 2, .block_n = 128, .row_max = true},
    {.dims = {128, 128}, .score = ScoreMode::kBiasMaskDropout, .warpgroups = 2, .block_n = 128, .row_max = true},

    // Biases and masks of any strides are staged in shared memory.
    {.dims = {64, 64}, .score = ScoreMode::kGeneric, .warpgroups = 2, .block_n = 96, .row_max = true},
    {.dims = {96, 96}, .score = ScoreMode::kGeneric, .warpgroups = 2, .block_n = 96, .row_max = true},
    {.dims = {128, 128}, .score = ScoreMode::kGeneric, .warpgroups = 2, .block_n = 96, .row_max = true},
    {.dims = {192, 128}, .score = ScoreMode::kGeneric, .warpgroups = 2, .block_n = 64, .row_max = true},
    {.dims = {192, 192}, .score = ScoreMode::kGeneric, .warpgroups = 2, .block_n = 64, .row_max = true},
    {.dims = {128, 256}, .score = ScoreMode::kGeneric, .warpgroups = 2, .block_n = 64, .row_max = true},
    {.dims = {256, 256}, .score = ScoreMode::kGeneric, .warpgroups = 2, .block_n = 64, .row_max = true},
};
// clang-format on

// Whether the rows of the same head dims and score mode follow each other, as plan/sm90/forward.cpp expects.
constexpr bool rows_are_grouped() {
  const auto same = [](const ForwardConfig& a, const ForwardConfig& b) {
    return a.dims == b.dims && a.score == b.score;
  };
  for (size_t row = 1; row < std::size(kForwardConfigs); ++row) {
    for (size_t earlier = 0; earlier + 1 < row; ++earlier) {
      const bool belongs_there = same(kForwardConfigs[earlier], kForwardConfigs[row]);
      if (belongs_there && !same(kForwardConfigs[row - 1], kForwardConfigs[row])) return false;
    }
  }
  return true;
}
static_assert(rows_are_grouped());

// Whether rows of a score mode differ in the queries of a tile.
constexpr bool varies_queries(ScoreMode score) {
  return score == ScoreMode::kScaleOnly || score == ScoreMode::kAlibi || score == ScoreMode::kKeyBias;
}

// Registers of a consumer thread and of a producer thread; together they fill the register file. The producer needs
// more where it looks up the tiles of a mask.
struct ForwardRegisters {
  int consumer;
  int producer;
};
constexpr ForwardRegisters forward_registers(const ForwardConfig& config) {
  if (config.ctas_per_sm == 2) return {.consumer = 104, .producer = 32};
  if (config.warpgroups == 3) return {.consumer = 160, .producer = 32};
  if (config.has_bias_or_mask()) return {.consumer = 224, .producer = 56};
  return {.consumer = 232, .producer = 40};
}

// The table of single-tile kernels, whose key tile holds all keys of a sequence. A call takes the first row of its
// score mode that holds its head dims and keys. These stay in one stage, and the work tile's tiles of 64 queries go to
// the consumers round-robin. There are four consumers where S, and then P and O, fit 112 registers, and two where they
// take more than 160, or where shared memory holds no more.
struct SingleTileConfig {
  HeadDims dims = {64, 64};
  // kScaleOnly, kAlibi, or kKeyBias for a bias or a mask that is broadcast along queries.
  ScoreMode score = ScoreMode::kScaleOnly;
  int block_n;  // keys of the tile
  int warpgroups;
  int kv_stages;
  int q_stages = 2;            // per consumer
  int parts = 1;               // of the keys: the QK GEMM of each but the first overlaps the PV GEMM of the one before
  bool intra_overlap = false;  // a warpgroup issues the next S before it stores O

  constexpr bool has_key_bias() const { return score == ScoreMode::kKeyBias; }

  bool operator==(const SingleTileConfig&) const = default;
};
inline constexpr SingleTileConfig kSingleTileConfigs[] = {
    {.block_n = 80, .warpgroups = 4, .kv_stages = 6, .intra_overlap = true},
    {.block_n = 96, .warpgroups = 4, .kv_stages = 4, .q_stages = 3, .intra_overlap = true},
    {.block_n = 128, .warpgroups = 4, .kv_stages = 4},
    {.block_n = 160, .warpgroups = 3, .kv_stages = 3},
    {.block_n = 192, .warpgroups = 3, .kv_stages = 2, .intra_overlap = true},
    {.block_n = 208, .warpgroups = 3, .kv_stages = 2},
    {.block_n = 256, .warpgroups = 3, .kv_stages = 2, .parts = 2},
    {.dims = {128, 128}, .block_n = 80, .warpgroups = 2, .kv_stages = 3},
    {.dims = {128, 128}, .block_n = 128, .warpgroups = 2, .kv_stages = 2, .q_stages = 1},
    {.dims = {192, 192}, .block_n = 80, .warpgroups = 2, .kv_stages = 2, .q_stages = 1},

    {.score = ScoreMode::kKeyBias, .block_n = 80, .warpgroups = 4, .kv_stages = 6, .intra_overlap = true},
    {.score = ScoreMode::kKeyBias, .block_n = 128, .warpgroups = 4, .kv_stages = 3},
    {.score = ScoreMode::kKeyBias, .block_n = 160, .warpgroups = 3, .kv_stages = 3},
    {.score = ScoreMode::kKeyBias, .block_n = 208, .warpgroups = 3, .kv_stages = 2},
    {.score = ScoreMode::kKeyBias, .block_n = 256, .warpgroups = 3, .kv_stages = 2, .parts = 4},
    {.dims = {128, 128}, .score = ScoreMode::kKeyBias, .block_n = 80, .warpgroups = 2, .kv_stages = 3},
    {.dims = {128, 128}, .score = ScoreMode::kKeyBias, .block_n = 128, .warpgroups = 2, .kv_stages = 2, .q_stages = 1},

    {.score = ScoreMode::kAlibi, .block_n = 80, .warpgroups = 4, .kv_stages = 6, .intra_overlap = true},
    {.score = ScoreMode::kAlibi, .block_n = 128, .warpgroups = 4, .kv_stages = 4},
    {.score = ScoreMode::kAlibi, .block_n = 160, .warpgroups = 3, .kv_stages = 3},
    {.score = ScoreMode::kAlibi, .block_n = 208, .warpgroups = 3, .kv_stages = 2},
    {.score = ScoreMode::kAlibi, .block_n = 256, .warpgroups = 3, .kv_stages = 2, .parts = 2},
    {.dims = {128, 128}, .score = ScoreMode::kAlibi, .block_n = 80, .warpgroups = 2, .kv_stages = 3},
    {.dims = {128, 128}, .score = ScoreMode::kAlibi, .block_n = 128, .warpgroups = 2, .kv_stages = 2, .q_stages = 1},
};

// The keys of the row above one that has the same head dims and score mode, or 0. A call of this kernel has more keys
// than that.
constexpr int keys_of_row_above(const SingleTileConfig& row) {
  int above = 0;
  for (const SingleTileConfig& other : kSingleTileConfigs) {
    if (other.dims == row.dims && other.score == row.score && other.block_n < row.block_n) above = other.block_n;
  }
  return above;
}

constexpr ForwardRegisters single_tile_registers(const SingleTileConfig& config) {
  if (config.warpgroups == 4) return {.consumer = 112, .producer = 32};
  if (config.warpgroups == 3) return {.consumer = 160, .producer = 32};
  return {.consumer = 232, .producer = 40};
}

}  // namespace flash_attn_ext::sm90
