// A consumer warpgroup: the mainloop over tiles of keys for 64 queries of each work tile.
//
//   S = Q K(n)^T and O += P V(n + 1) are in flight together; then P = exp2(c S - c m).
//
// This is the intra-warpgroup overlap of FlashAttention-3, section 3.2. The exponentials begin when S is there, but
// ptxas waits for O, too, before them, except where ForwardConfig::late_pv_wait is true or weights are dropped. Kernels
// without overlap (ForwardConfig::intra_overlap) wait for O before they issue S.
#pragma once

#include "kernels/score/dropout.cuh"
#include "kernels/score/score_mod.cuh"
#include "kernels/sm90/bias_mask.cuh"
#include "kernels/sm90/forward/epilogue.cuh"
#include "kernels/sm90/forward/stages.cuh"
#include "kernels/sm90/forward/traits.h"
#include "kernels/sm90/kernel.cuh"
#include "ptx/pin.h"

namespace flash_attn_ext::sm90 {

// A bias in tiles and a mask as bits, for score/score_mod.cuh. In kernels for a mask, or for a bias and a mask, TMA
// loads the bias beside K, and a thread reads the mask's bits one tile ahead. If there are intervals or blocks in place
// of a mask, it computes them.
template <class Traits>
struct TmaBiasMask {
  using Tile = typename Traits::BiasTile;
  using Where = typename Traits::Where;
  static constexpr int kKeys = Traits::kConfig.block_n;
  static constexpr int kTilesOfWord = static_cast<int>(attention::MaskBits::kKeys) / kKeys;
  static_assert(kTilesOfWord * kKeys == attention::MaskBits::kKeys || !Traits::kHasBits);

  const Tile* bias;  // in the current stage
  // For the thread's rows: the mask's words for the first tile of keys, or the begins and ends of their intervals.
  const uint32_t* words[2];
  int2 first[2];         // begin and end of these rows' first interval
  uint32_t bits[2];      // the mask's bits for the next tile
  bool has_unmasked[2];  // whether some of them were set in the work tile

  // Prepares a work tile and its first tile of keys. The addresses of the words are cached, since computing them takes
  // many instructions.
  __device__ __forceinline__ void start(const Where& where, bool masked) {
    has_unmasked[0] = has_unmasked[1] = false;
    if (masked) find_words(where);
    if (!where.p.score_mod.selects_keys()) prepare(where, masked);
  }

  // The bits of a work tile's first tile of keys, which are computed while the QK GEMM is in flight.
  __device__ __forceinline__ void finish_start(const Where& where) {
    if (where.p.score_mod.selects_keys()) compute_bits(where);
  }

  // Reads the mask's bits for a tile of keys; all bits are set where the mask hides nothing.
  __device__ __forceinline__ void prepare(const Where& where, bool masked) {
    if (masked && where.p.score_mod.selects_keys()) {
      compute_bits(where);
      return;
    }
    const auto key_tile = static_cast<int>(where.key(0, 0)) / kKeys;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      bits[r] = masked ? words[r][key_tile / kTilesOfWord * 4] >> key_tile % kTilesOfWord * (32 / kTilesOfWord) : ~0u;
    }
  }

  // Keeps track of rows of which the mask hides every key. Called before the next tile is prepared.
  __device__ __forceinline__ void track_unmasked() {
    constexpr int kOtherBits = 32 - 32 / kTilesOfWord;  // those of later tiles
#pragma unroll
    for (int r = 0; r < 2; ++r) has_unmasked[r] |= bits[r] << kOtherBits != 0;
  }

  template <bool kAny, class Function>
  __device__ __forceinline__ void for_each_bias(const Where&, Function&& function) const {
    for_each_boxed_bias<typename Traits::Scores>(bias, function);
  }

  template <class Function>
  __device__ __forceinline__ void for_each_masked(Function&& function) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < 2 * Traits::Scores::kColumnTiles; ++i) {
        if ((bits[r] & 1u << i) == 0) function(r, i / 2, i % 2);
      }
    }
  }

 private:
  __device__ __forceinline__ void compute_bits(const Where& where) {
    const attention::ScoreMod& mod = where.p.score_mod;
    const auto first_key = static_cast<int>(where.key(0, 0));
    bits[0] = bits[1] = ~0u;
    if (mod.intervals.present()) compute_bits(mod.intervals, first_key);
    if (mod.blocks.present()) {  // the warpgroup's 64 queries belong to one block
      const uint8_t* const row = mod.blocks.row(where.coord.sequence.batch, where.coord.head, where.query(0, 0));
      const uint32_t of_blocks = mod.blocks.quad_word(row, first_key, kKeys);
      bits[0] &= of_blocks;
      bits[1] &= of_blocks;
    }
  }

  __device__ __forceinline__ void compute_bits(const attention::RowIntervals& intervals, int first_key) {
    const int thread = tile::lane() % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) bits[r] = intervals.quad_word(first[r].x, first[r].y, first_key, thread);
#pragma unroll 1
    for (int m = 1; m < intervals.count; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const auto* const row = reinterpret_cast<const int32_t*>(words[r]) + 2 * m;
        bits[r] |= intervals.quad_word(row[0], row[1], first_key, thread);
      }
    }
  }

  __device__ __forceinline__ void find_words(const Where& where) {
    const attention::RowIntervals& intervals = where.p.score_mod.intervals;
    if (intervals.present()) {
      const attention::Sequence& sequence = where.coord.sequence;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int64_t query = min(where.query(Traits::Scores::row(r), 0), sequence.num_queries - 1);
        const int32_t* const row = intervals.row(sequence, where.coord.head, query);
        words[r] = reinterpret_cast<const uint32_t*>(row);
        first[r] = {row[0], row[1]};
      }
      return;
    }
    const attention::MaskBits& mask = where.p.score_mod.mask_bits;  // absent with blocks, and then not read
    const uint32_t* const first = mask.data + where.coord.sequence.batch * mask.batch_stride +
                                  where.coord.head * mask.head_stride + tile::lane() % 4;
    const int64_t last = where.p.sequences.max_seqlen_q - 1;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      words[r] = first + min(where.query(Traits::Scores::row(r), 0), last) * mask.query_stride;
    }
  }
};

// In kernels that do not change scores in this way.
struct Unchanged {
  __device__ __forceinline__ explicit Unchanged(const attention::ScoreMod&) {}
};

template <class Traits>
struct ForwardConsumer {
  using Element = typename Traits::Element;
  using Shared = ForwardShared<Traits>;
  using Work = typename Shared::Work;
  using Scores = typename Traits::Scores;
  using Where = typename Traits::Where;
  static constexpr int kKeys = Traits::kConfig.block_n;
  static constexpr int kWarpgroups = Traits::kConfig.warpgroups;
  static constexpr bool kOverlaps = Traits::kConfig.intra_overlap;
  // Clears O before its first GEMM. With few registers ptxas finds enough only if O is not carried from one work tile
  // to the next.
  static constexpr bool kClearsOutput = Traits::kConfig.ctas_per_sm > 1;
  static constexpr int kTilesOfSums = 128;  // tiles of keys after which the sums are flushed
  // Whether it keeps track of rows from which a mask hides everything, so that their sum of 0 is known to be right.
  static constexpr bool kTracksUnmasked = Traits::kHasBits && Traits::kKeepsFirstMaximum;

  using BiasMask = std::conditional_t<Traits::kHasBits, TmaBiasMask<Traits>,
                                      std::conditional_t<Traits::kGeneric, PrefetchedBiasMask<Traits>, NoBiasMask>>;

  const typename Traits::Arguments& args;
  Shared& shared;
  const int warpgroup;
  BiasMask bias_mask;
  // In registers, since converting the numbers of a call in each step takes longer than capping the scores.
  static constexpr bool kCaps = caps_scores(Traits::kConfig.score);
  [[no_unique_address]] std::conditional_t<kCaps, Softcap, Unchanged> softcap{args.params.score_mod};
  static constexpr bool kAlibi = adds_alibi(Traits::kConfig.score);
  [[no_unique_address]] std::conditional_t<kAlibi, Alibi<Traits::kConfig.later_keys>, Unchanged> alibi{
      args.params.score_mod};

  Scores scores;
  typename Traits::Output out;
  typename Traits::RowSums sums;  // of the rounded P
  tile::PackedRows<kKeys> p;
  typename Traits::Softmax softmax;
  RowEnds ends;
  bool out_is_empty = true;
  bool needs_repair = false;  // whether some of the warp's rows need it, even relative to the row maximum
  bool masked = false;        // whether the mask hides something of the current tile of keys
  MainloopTile next{};        // the next tile of keys
  QueryStages<Traits> queries{shared};
  KeyStages<Traits> stages{shared, warpgroup};
  typename decltype(Shared::work_pipeline)::State work_state{};

  __device__ __forceinline__ void run() {
    out.clear();
    if (warpgroup == kWarpgroups - 1) ping_pong_arrive<Traits>(warpgroup);
#pragma unroll 1
    for (;;) {
      shared.work_pipeline.consumer_wait(work_state);
      const Work& work = shared.work[work_state.stage];
      const WorkKind kind = static_cast<WorkKind>(uniform(static_cast<int>(work.kind)));
      if (kind == WorkKind::kTile) {
        attend<Traits::kKeepsFirstMaximum ? Rescale::kNever : Rescale::kAboveThreshold>(work);
      } else if (kind == WorkKind::kEnd) {
        break;
      } else if constexpr (Traits::kKeepsFirstMaximum) {
        if (kind == WorkKind::kAgain) {
          attend<Rescale::kAboveThreshold>(work);
        } else if (!any_flagged()) {
          break;
        }
      }
      consumer_release(shared.work_pipeline.empty[work_state.stage]);
      work_state.advance();
    }
    queries.await_output();
    // With split-KV the combine kernel finishes the rows.
    const int last = uniform(shared.work[work_state.stage].tile);
    if (!Traits::kConfig.split_kv && needs_repair) repair_flagged<Traits>(args, last, first_row() + warp_row());
  }

 private:
  __device__ __forceinline__ bool any_flagged() {
    queries.await_output();
    if (tile::lane() == 0) ptx::arrive(shared.all_processed);
    return uniform(shared.wait_for_flags()) != 0;
  }

  __device__ __forceinline__ int first_row() const { return warpgroup * tile::kWarpgroupRows; }
  __device__ __forceinline__ static int warp_row() { return tile::warp() % 4 * 16; }

  template <Rescale kRescale>
  __device__ __forceinline__ void attend(const Work& work) {
    const TileRange& seen = work.own[warpgroup];
    const TileRange own = {uniform(seen.begin), uniform(seen.end), uniform(seen.full_begin), uniform(seen.full_end)};
    const int begin = uniform(work.begin);
    const int end = uniform(work.end);
    int n = end - 1;
    bool store_enabled = Traits::kConfig.early_lse && is_store_enabled<Traits, kRescale>(args.flags, work.tile);
    int ahead = 0;  // tiles of keys whose values are still to be drained: one or two
#pragma unroll 1
    for (; n >= own.end && n >= begin; n = next.tile, ++ahead) {
      drain_keys(n, end);
      if constexpr (Traits::kValuesFirst) stages.drain_values(1);
    }
    if constexpr (Traits::kValuesFirst) ahead = 0;
    if (n >= own.begin && n >= begin) {
      prologue<kRescale>(work, n, own);
      stages.drain_values(ahead);
      n = next.tile;
      if constexpr (Traits::kConfig.unmasked_loop) {
#pragma unroll 1
        for (; n >= own.begin && n >= own.full_end; n = next.tile) step<kRescale, false>(work, n, own);
#pragma unroll 1
        for (; n >= own.begin && n >= own.full_begin; n = next.tile) step<kRescale, true>(work, n, own);
      }
#pragma unroll 1
      for (; n >= own.begin; n = next.tile) step<kRescale, false>(work, n, own);
      queries.release();
      issue_pv_gemm();
      if constexpr (Traits::kConfig.early_lse) {
        end_rows<kRescale>(work, store_enabled);
        await_values_after(ends.l[0] + ends.l[1]);
      } else {
        await_values();
      }
      drain_rest(n, begin, end);
    } else {
      out.clear();
      sums = {};
      softmax = {
          .m = {-INFINITY, -INFINITY}, .l = {}, .kept = {}, .factor = {1.0f, 1.0f}, .row_max = {}, .raised = false};
      if constexpr (Traits::kConfig.early_lse) end_rows<kRescale>(work, store_enabled);
      stages.drain_values(ahead);
      drain_rest(n, begin, end);
      if (end > begin) queries.drain();
    }
    const bool has_queries = end > begin;
    if constexpr (!Traits::kConfig.early_lse) store_enabled = is_store_enabled<Traits, kRescale>(args.flags, work.tile);
    if (store_enabled) finish<kRescale>(work, has_queries);
    if (has_queries) queries.keep();
    __syncwarp();  // unless the warp is converged, ptxas keeps no descriptor in uniform registers
  }

  template <Rescale kRescale>
  __device__ __forceinline__ void finish(const Work& work, bool has_queries) {
    bool needs_recompute;
    if constexpr (Traits::kConfig.split_kv) {
      needs_recompute = epilogue_of(work).template store_partial<kRescale>(out, softmax, sums);
    } else {
      if constexpr (!Traits::kConfig.early_lse) end_rows<kRescale>(work, true);
      needs_recompute =
          epilogue_of(work).store(out, ends, sums, has_queries ? &shared.q[queries.state.stage][warpgroup] : nullptr);
    }
    __syncwarp();
    Repair repair = needs_recompute ? Repair::kNotFinite : Repair::kNone;
    if constexpr (Traits::kConfig.has_key_bias()) {
      if (!needs_recompute && __any_sync(0xFFFFFFFFu, ends.is_inexact)) repair = Repair::kInexactScores;
    }
    if constexpr (kRescale == Rescale::kAboveThreshold) needs_repair |= repair != Repair::kNone;
    flag_rows<Traits, kRescale>(args.flags, work.tile, repair, shared.any_flagged);
  }

  template <Rescale kRescale>
  __device__ __forceinline__ void end_rows(const Work& work, bool store_enabled) {
    ends = epilogue_of(work).template end_rows<kRescale>(softmax, store_enabled, [&](int r) {
      if constexpr (kTracksUnmasked) {
        return !bias_mask.has_unmasked[r];
      } else {
        return false;
      }
    });
  }

  __device__ __forceinline__ ForwardEpilogue<Traits> epilogue_of(const Work& work) const {
    return {args, work, first_row() + warp_row(), shared.key_bias_maximum(work_state.stage)};
  }

  // The prologue: the first tile of keys has no PV GEMM to overlap with.
  template <Rescale kRescale>
  __device__ __forceinline__ void prologue(const Work& work, int n, const TileRange& own) {
    if constexpr (kClearsOutput) {
      out.clear();
      sums = {};
    } else {
      out_is_empty = true;
      sums.clear();
    }
    if constexpr (Traits::kConfig.has_bias_or_mask())
      bias_mask.start(where_of(work, n), args.params.score_mod.hides_keys());
    if constexpr (kAlibi) alibi.start(where_of(work, n));
    queries.wait();
    await_keys(n);
    const bool in_ping_pong = n + 1 != uniform(work.end);
    if (in_ping_pong) ping_pong_sync<Traits>(warpgroup);
    issue_qk_gemm();
    if (in_ping_pong) ping_pong_arrive<Traits>(warpgroup);
    if constexpr (Traits::kHasBits) bias_mask.finish_start(where_of(work, n));
    ptx::wait_wgmma<0>();
    ptx::pin_registers(scores.c[0]);
    modify_scores<false>(work, n, own);
    softmax.template begin<kRescale>(scores, exponent());
    softmax.template track_row_max<kRescale>(scores);
    queries.release_previous();
    drop(work, n);
    p.pack(scores, Element{});
    sums.add(p, Element{});
    stages.clear_values_after(where_of(work, n).num_keys());
  }

  template <Rescale kRescale, bool kFull>
  __device__ __forceinline__ void step(const Work& work, int n, const TileRange& own) {
    if constexpr (!kOverlaps) {
      issue_pv_gemm();
      await_values();
    }
    await_keys(n);
    ping_pong_sync<Traits>(warpgroup);
    issue_qk_gemm();
    if constexpr (kOverlaps) issue_pv_gemm();
    ping_pong_arrive<Traits>(warpgroup);
    ptx::wait_wgmma<kOverlaps ? 1 : 0>();
    ptx::pin_registers(scores.c[0]);
    modify_scores<kFull>(work, n, own);
    softmax.template update<kRescale>(scores, exponent(), Traits::kRescaleThresholdLog2, [&](float computed) {
      if constexpr (Traits::kConfig.late_pv_wait) await_values_after(computed);
    });
    drop(work, n);
    if constexpr (always_drops(Traits::kConfig.score)) {
      await_values_after(softmax.total());
    } else if constexpr (kOverlaps && !Traits::kConfig.late_pv_wait) {
      await_values();
    }
    softmax.template track_row_max<kRescale>(scores);
    if (Traits::kConfig.rounded_sums && n % kTilesOfSums == 0) sums.flush();
    p.pack(scores, Element{});
    if constexpr (kRescale == Rescale::kAboveThreshold) softmax.rescale(out, sums);
    sums.add(p, Element{});
  }

  __device__ __forceinline__ Where where_of(const Work& work, int n) const {
    return {args.params, work.coord, int64_t{work.first_query} + first_row() + warp_row(), int64_t{n} * kKeys};
  }

  // Turns q.k into scores, and releases the stage of K.
  template <bool kFull>
  __device__ __forceinline__ void modify_scores(const Work& work, int n, const TileRange& own) {
    const Where where = where_of(work, n);
    const bool has_next = next.tile >= own.begin;
    if constexpr (Traits::kHasBoxes) {
      bias_mask.bias = &shared.bias[stages.k.stage][warpgroup];
      modify<false>(scores, where, bias_mask, masked, folds_scale());
      stages.sync_warpgroup();  // no thread reads the bias any more
    }
    stages.release_keys();
    queries.release_early(!has_next);
    if constexpr (kCaps) {
      for_each_element<Scores>(
          [&](int r, int, int j, int e, int) { scores.at(r, j, e) = softcap(scores.at(r, j, e)); });
    }
    if constexpr (kAlibi) alibi.apply(scores, n * kKeys);
    if constexpr (Traits::kHasBits && !Traits::kHasBoxes) {
      if (masked) bias_mask.for_each_masked([&](int r, int j, int e) { scores.at(r, j, e) = -INFINITY; });
    }
    if constexpr (Traits::kHasBits) {
      if constexpr (kTracksUnmasked) bias_mask.track_unmasked();
      if (has_next) bias_mask.prepare(where_of(work, next.tile), next.masked);
    }
    if constexpr (Traits::kGeneric) {
      bias_mask.await();
      modify<true>(scores, where, bias_mask, masked, folds_scale());
      if (has_next) bias_mask.prepare(where_of(work, next.tile), next.masked);
    }
    if (!kFull && !own.full(n)) hide_invisible<Traits>(args, where, scores);
  }

  __device__ __forceinline__ void drop(const Work& work, int n) {
    if constexpr (Traits::kConfig.may_drop()) {
      if (Traits::kGeneric && !args.params.dropout.enabled()) return;
      draw_dropout(where_of(work, n), [&](int r, int j, int e, bool kept) {
        if (!kept) scores.at(r, j, e) = 0.0f;
      });
      if constexpr (Traits::kConfig.rounded_sums) softmax.add_kept(scores);
    }
  }

  __device__ __forceinline__ bool folds_scale() const {
    if constexpr (kCaps || kAlibi) return false;
    return !Traits::kConfig.modifies_scores() || args.params.score_mod.only_scales();
  }
  __device__ __forceinline__ Exponent exponent() const {
    const bool folded = folds_scale();
    return {folded, folded ? static_cast<float>(args.params.score_mod.scale) * kLog2e : kLog2e};
  }

  // Waits for tile n of keys, and looks up which one is next.
  __device__ __forceinline__ void await_keys(int n) {
    stages.wait_keys();
    if constexpr (Traits::kConfig.has_bias_or_mask()) {
      const KeyIteration& iteration = shared.iterations[stages.k.stage];
      masked = uniform(iteration.at.masked) != 0;
      next = {uniform(iteration.next.tile), uniform(iteration.next.masked) != 0};
    } else {
      next.tile = n - 1;
    }
  }

  __device__ __forceinline__ void issue_qk_gemm() {
    using Q = typename Traits::QTile;
    using K = typename Traits::KTile;
    int rows = queries.state.stage * kWarpgroups + warpgroup;
    // With single stages no descriptor changes, and ptxas would keep so many in registers that it spills others.
    if constexpr (Traits::kValuesFirst) rows = ptx::pin(rows);
    tile::issue_gemm(scores, tile::SmemOperand<Q>(shared.q[0][0]).after(rows),
                     tile::SmemOperand<K>(shared.k[0]).after(stages.k.stage), stages.key_bias());
  }
  __device__ __forceinline__ void issue_pv_gemm() {
    using V = typename Traits::VTile;
    stages.wait_values();
    const auto v = tile::SmemOperand<V>(shared.v[0]).after(stages.v.stage);
    if constexpr (Traits::kConfig.rounded_sums) {
      tile::issue_gemm(out, sums, p, v, kClearsOutput || !out_is_empty);
    } else {
      tile::issue_gemm(out, p, v, kClearsOutput || !out_is_empty);
    }
    out_is_empty = false;
  }

  __device__ __forceinline__ void await_values() {
    ptx::wait_wgmma<0>();
    ptx::pin_registers(out.c[0]);
    if constexpr (Traits::kConfig.rounded_sums) sums.pin();
    stages.release_values();
  }

  __device__ __forceinline__ void await_values_after(float computed) {
    ptx::compute_before_wait(computed);
    await_values();
  }

  // Drains a tile of keys that is masked for this warpgroup's rows.
  __device__ __forceinline__ void drain_keys(int n, int end) {
    await_keys(n);
    stages.drain_keys(/*in_ping_pong=*/n + 1 != end);
  }
  __device__ __forceinline__ void drain_rest(int n, int begin, int end) {
#pragma unroll 1
    for (; n >= begin; n = next.tile) {
      drain_keys(n, end);
      stages.drain_values(1);
    }
  }
};

}  // namespace flash_attn_ext::sm90
