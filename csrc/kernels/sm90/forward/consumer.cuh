// A warpgroup that computes: its 64 queries of each tile that the producer sends.
//
//   S = Q K(n)^T  |  O += P V(n + 1), both in flight;  P = exp2(c S - c m), while O is still being added to.
//
// Small kernels await O before they start S (ForwardTile::overlaps).
#pragma once

#include "kernels/score/dropout.cuh"
#include "kernels/score/score_mod.cuh"
#include "kernels/sm90/forward/arguments.h"
#include "kernels/sm90/forward/finish.cuh"
#include "kernels/sm90/forward/key_stages.cuh"
#include "kernels/sm90/forward/query_stages.cuh"
#include "kernels/sm90/forward/repair_flagged.cuh"
#include "kernels/sm90/forward/row_softmax.cuh"
#include "kernels/sm90/forward/terms.cuh"
#include "kernels/sm90/forward/traits.h"
#include "kernels/sm90/forward/turns.cuh"
#include "kernels/sm90/uniform.h"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct ForwardConsumer {
  using Element = typename Traits::Element;
  using Shared = ForwardShared<Traits>;
  using Work = typename Shared::Work;
  using Scores = typename Traits::Scores;
  using Where = typename Traits::Where;
  static constexpr int kKeys = Traits::kTile.keys;
  static constexpr int kWarpgroups = Traits::kTile.warpgroups;
  static constexpr bool kOverlaps = Traits::kTile.overlaps;
  // Before its first product. With few registers ptxas finds enough only if O is not carried from tile to tile.
  static constexpr bool kClearsOutput = Traits::kTile.blocks > 1;
  static constexpr int kTilesOfSums = 128;  // of keys that one sum of products takes in

  using Terms = std::conditional_t<Traits::kHasBits, BoxTerms<Traits>,
                                   std::conditional_t<Traits::kExtended, StagedTerms<Traits>, NoBiasMask>>;

  const ForwardArguments& args;
  Shared& shared;
  const int warpgroup;
  Terms terms;

  Scores scores;
  typename Traits::Output out;
  typename Traits::RowSums sums;  // of P as it was rounded
  tile::PackedRows<kKeys> p;
  RowSoftmax softmax;
  RowEnds ends;
  bool out_is_empty = true;
  bool not_finite = false;  // some result of the warp's rows, even with the maximum as the reference
  bool masked = false;      // whether the mask hides some of the tile of keys at hand
  Visit next{};             // the tile of keys that comes after it
  QueryStages<Traits> queries{shared};
  KeyStages<Traits> stages{shared, warpgroup};
  typename decltype(Shared::work_ring)::Position work_at{};

  __device__ __forceinline__ void run() {
    out.clear();
    if (warpgroup == kWarpgroups - 1) pass_turn<Traits>(warpgroup);
#pragma unroll 1
    for (;;) {
      shared.work_ring.wait_full(work_at);
      const Work& work = shared.work[work_at.stage];
      const WorkKind kind = static_cast<WorkKind>(uniform(static_cast<int>(work.kind)));
      if (kind == WorkKind::kTile) {
        attend<Traits::kFixesReference ? Reference::kFirstTile : Reference::kRaised>(work);
      } else if (kind == WorkKind::kEnd) {
        break;
      } else if constexpr (Traits::kFixesReference) {
        if (kind == WorkKind::kAgain) {
          attend<Reference::kRaised>(work);
        } else if (!any_flagged()) {
          break;
        }
      }
      __syncwarp();
      if (tile::lane() == 0) ptx::arrive(shared.work_ring.empty[work_at.stage]);
      work_at.advance();
    }
    queries.await_output();
    // Rows whose keys are divided are not finished yet.
    const int last = uniform(shared.work[work_at.stage].tile);
    if (!Traits::kDividesKeys && not_finite) repair_flagged<Traits>(args, last, first_row() + warp_row());
  }

 private:
  __device__ __forceinline__ bool any_flagged() {
    queries.await_output();
    if (tile::lane() == 0) ptx::arrive(shared.all_passed);
    return uniform(shared.wait_for_flags()) != 0;
  }

  __device__ __forceinline__ int first_row() const { return warpgroup * tile::kWarpgroupRows; }
  __device__ __forceinline__ static int warp_row() { return tile::warp() % 4 * 16; }

  template <Reference kReference>
  __device__ __forceinline__ void attend(const Work& work) {
    const TileRange& seen = work.own[warpgroup];
    const TileRange own = {uniform(seen.begin), uniform(seen.end), uniform(seen.full_begin), uniform(seen.full_end)};
    const bool half = Traits::kHalvesFirst && uniform(work.sees_half[warpgroup]) != 0;
    const int begin = uniform(work.begin);
    const int end = uniform(work.end);
    int n = end - 1;
    bool wanted = Traits::kEndsRowsFirst && is_wanted<Traits, kReference>(args.notes, work.tile);
    int ahead = 0;  // tiles of keys of which the values are still to be skipped: one or two
#pragma unroll 1
    for (; n >= own.end && n >= begin; n = next.tile, ++ahead) skip_keys(n, end);
    if (n >= own.begin && n >= begin) {
      start<kReference>(work, n, own, half);
      stages.skip_values(ahead);
      n = next.tile;
      if constexpr (Traits::kLoopForFull) {
#pragma unroll 1
        for (; n >= own.begin && n >= own.full_end; n = next.tile) step<kReference, false>(work, n, own);
#pragma unroll 1
        for (; n >= own.begin && n >= own.full_begin; n = next.tile) step<kReference, true>(work, n, own);
      }
#pragma unroll 1
      for (; n >= own.begin; n = next.tile) step<kReference, false>(work, n, own);
      queries.release();
      multiply_values();
      if constexpr (Traits::kEndsRowsFirst) {
        ends = end_of(work).template end_rows<kReference>(softmax, wanted);
        await_values_after(ends.l[0] + ends.l[1]);
      } else {
        await_values();
      }
      skip_rest(n, begin, end);
    } else {
      out.clear();
      sums = {};
      softmax = {.m = {-INFINITY, -INFINITY}, .l = {}, .kept = {}, .factor = {1.0f, 1.0f}, .raised = false};
      if constexpr (Traits::kEndsRowsFirst) ends = end_of(work).template end_rows<kReference>(softmax, wanted);
      stages.skip_values(ahead);
      skip_rest(n, begin, end);
      if (end > begin) queries.skip();
    }
    const bool has_queries = end > begin;
    if constexpr (!Traits::kEndsRowsFirst) wanted = is_wanted<Traits, kReference>(args.notes, work.tile);
    if (wanted) finish<kReference>(work, has_queries);
    if (has_queries) queries.keep();
    __syncwarp();  // converged: else ptxas keeps no descriptor in uniform registers
  }

  template <Reference kReference>
  __device__ __forceinline__ void finish(const Work& work, bool has_queries) {
    bool suspicious;
    if constexpr (Traits::kDividesKeys) {
      suspicious = end_of(work).template store_part<kReference>(out, softmax, sums);
    } else {
      if constexpr (!Traits::kEndsRowsFirst) ends = end_of(work).template end_rows<kReference>(softmax, true);
      suspicious = end_of(work).store(out, ends, sums, has_queries ? &shared.q[queries.at.stage][warpgroup] : nullptr);
    }
    __syncwarp();
    if constexpr (kReference == Reference::kRaised) not_finite |= suspicious;
    note_rows<Traits, kReference>(args.notes, work.tile, suspicious, shared.any_flagged);
  }

  __device__ __forceinline__ ForwardFinish<Traits> end_of(const Work& work) const {
    return {args, work, first_row() + warp_row()};
  }

  // The first tile of keys: nothing to overlap with.
  template <Reference kReference>
  __device__ __forceinline__ void start(const Work& work, int n, const TileRange& own, bool half) {
    if constexpr (kClearsOutput) {
      out.clear();
      sums = {};
    } else {
      out_is_empty = true;
      sums.clear();
    }
    if constexpr (Traits::kHasTerms) terms.start(where_of(work, n), args.params.score_mod.mask.present());
    queries.wait();
    await_keys(n);
    const bool has_turn = n + 1 != uniform(work.end);
    if (has_turn) take_turn<Traits>(warpgroup);
    multiply_keys();
    if (has_turn) pass_turn<Traits>(warpgroup);
    ptx::wait_products<0>();
    ptx::pin_registers(scores.c[0]);
    if (!Traits::kHalvesFirst || !half) {
      modify_scores<false>(work, n, own);
      softmax.template begin<kReference>(scores, exponent());
      queries.give_back_last();
      drop(work, n);
      p.pack(scores, Element{});
      sums.add(p, Element{});
    } else {
      weigh_half<kReference>(work, n);
      queries.give_back_last();
    }
  }

  // The first half of the scores of a tile: nothing is seen of the other one.
  template <Reference kReference>
  __device__ __forceinline__ void weigh_half(const Work& work, int n) {
    typename Traits::HalfOfScores half;
#pragma unroll
    for (int j = 0; j < half.kColumnTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) half.c[0][j][e] = scores.c[0][j][e];
    }
    stages.release_keys();
    where_of<typename Traits::HalfOfScores>(work, n).hide_invisible(half);
    softmax.template begin<kReference>(half, exponent());
    p.pack(half, Element{});
    sums.add(p, Element{});
  }

  template <Reference kReference, bool kFull>
  __device__ __forceinline__ void step(const Work& work, int n, const TileRange& own) {
    if constexpr (!kOverlaps) {
      multiply_values();
      await_values();
    }
    await_keys(n);
    take_turn<Traits>(warpgroup);
    multiply_keys();
    if constexpr (kOverlaps) multiply_values();
    pass_turn<Traits>(warpgroup);
    ptx::wait_products<kOverlaps ? 1 : 0>();
    ptx::pin_registers(scores.c[0]);
    modify_scores<kFull>(work, n, own);
    softmax.template update<kReference>(scores, exponent(), Traits::kRaiseLog2, [&](float computed) {
      if constexpr (Traits::kAwaitsWithin) await_values_after(computed);
    });
    drop(work, n);
    if constexpr (Traits::kVariant == Variant::kDropout) {
      await_values_after(softmax.total());
    } else if constexpr (kOverlaps && !Traits::kAwaitsWithin) {
      await_values();
    }
    if (Traits::kSumsRounded && n % kTilesOfSums == 0) sums.flush();
    p.pack(scores, Element{});
    if constexpr (kReference == Reference::kRaised) softmax.rescale(out, sums);
    sums.add(p, Element{});
  }

  template <class Of = Scores>
  __device__ __forceinline__ ScoreTile<Rows::kQueries, Of> where_of(const Work& work, int n) const {
    return {args.params, work.item, int64_t{work.first_query} + first_row() + warp_row(), int64_t{n} * kKeys};
  }

  // q.k -> scores, whose keys are released.
  template <bool kFull>
  __device__ __forceinline__ void modify_scores(const Work& work, int n, const TileRange& own) {
    const Where where = where_of(work, n);
    const bool has_next = next.tile >= own.begin;
    if constexpr (Traits::kHasBoxes) {
      terms.bias = &shared.bias[stages.k.stage][warpgroup];
      modify<false>(scores, where, terms, masked, folds_scale());
      stages.meet();  // the bias has no readers any more
    }
    stages.release_keys();
    queries.release_early(!has_next);
    if constexpr (Traits::kHasBits && !Traits::kHasBoxes) {
      if (masked) terms.for_each_masked([&](int r, int j, int e) { scores.at(r, j, e) = -INFINITY; });
    }
    if constexpr (Traits::kHasBits) {
      if (has_next) terms.prepare(next.tile, next.masked);
    }
    if constexpr (Traits::kExtended) {
      terms.await();
      modify<true>(scores, where, terms, masked, folds_scale());
      if (has_next) terms.prepare(where_of(work, next.tile), next.masked);
    }
    if (!kFull && !own.full(n)) where.hide_invisible(scores);
  }

  __device__ __forceinline__ void drop(const Work& work, int n) {
    if constexpr (Traits::kMayDrop) {
      if (Traits::kExtended && !args.params.dropout.enabled()) return;
      draw_dropout(where_of(work, n), [&](int r, int j, int e, bool kept) {
        if (!kept) scores.at(r, j, e) = 0.0f;
      });
      if constexpr (Traits::kSumsRounded) softmax.add_kept(scores);
    }
  }

  __device__ __forceinline__ bool folds_scale() const {
    return !Traits::kHasBias || args.params.score_mod.only_scales();
  }
  __device__ __forceinline__ Exponent exponent() const {
    const bool folded = folds_scale();
    return {folded, folded ? static_cast<float>(args.params.score_mod.scale) * kLog2e : kLog2e};
  }

  // Waits for tile n of keys, and looks up which one comes after it.
  __device__ __forceinline__ void await_keys(int n) {
    stages.wait_keys();
    if constexpr (Traits::kHasTerms) {
      const KeyVisit& visit = shared.visits[stages.k.stage];
      masked = uniform(visit.at.masked) != 0;
      next = {uniform(visit.next.tile), uniform(visit.next.masked) != 0};
    } else {
      next.tile = n - 1;
    }
  }

  __device__ __forceinline__ void multiply_keys() {
    using Q = typename Traits::QTile;
    using K = typename Traits::KTile;
    tile::start_product(scores, tile::BoxOperand<Q>(shared.q[0][0]).after(queries.at.stage * kWarpgroups + warpgroup),
                        tile::BoxOperand<K>(shared.k[0]).after(stages.k.stage));
  }
  __device__ __forceinline__ void multiply_values() {
    using V = typename Traits::VTile;
    stages.wait_values();
    const auto v = tile::BoxOperand<V>(shared.v[0]).after(stages.v.stage);
    if constexpr (Traits::kSumsRounded) {
      tile::start_product(out, sums, p, v, kClearsOutput || !out_is_empty);
    } else {
      tile::start_product(out, p, v, kClearsOutput || !out_is_empty);
    }
    out_is_empty = false;
  }

  __device__ __forceinline__ void await_values() {
    ptx::wait_products<0>();
    ptx::pin_registers(out.c[0]);
    if constexpr (Traits::kSumsRounded) sums.pin();
    stages.release_values();
  }

  __device__ __forceinline__ void await_values_after(float computed) {
    ptx::compute_before_wait(computed);
    await_values();
  }

  // Tiles of keys that only other warpgroups' rows see.
  __device__ __forceinline__ void skip_keys(int n, int end) {
    await_keys(n);
    stages.skip_keys(/*has_turn=*/n + 1 != end);
  }
  __device__ __forceinline__ void skip_rest(int n, int begin, int end) {
#pragma unroll 1
    for (; n >= begin; n = next.tile) {
      skip_keys(n, end);
      stages.skip_values(1);
    }
  }
};

}  // namespace flash_attn_ext::sm90
