// The exact delta on Hopper, sum of P dP - dlse, and from it the gradient of ALiBi slopes. It reads no rounded O, whose
// error would not cancel in sums of dS over queries.
//
// Beside a float32 key bias it runs before the kernels of dQ, dK, dV and dBias, and writes delta. A delta that is not
// finite may be 0 times a value that no query attends; the delta of O takes its place (statistics.cuh).
//
// Beside slopes it runs after the other kernels, none of which computes their gradient, and does not write delta. With
// w = -|key - query - diagonal|, which is d score / d slope, a slope's gradient is
//
//   sum of dS w = sum over queries of [ sum of P dP w - delta * sum of P w ]
//
// All three sums of a query come from one pass over its keys. A work tile writes its share of the gradient once, and
// common::launch_dalibi adds those of a head.
//
// Grid: persistent CTAs, at most one per SM. A work tile has 128 queries of a head. In each key tile:
//
//   S = Q K^T  |  dP = dO V^T, beside it P = exp2(c S + slope w or bias - lse)  |  the sums of P dP, P w and P dP w
//
//  Warpgroup 0         Producer: one thread fetches work tiles and issues all TMA copies.
//  Warpgroups 1 and 2  64 queries each.
//
// Every sum has one order. Bound: the two GEMMs, and at head dim 64 the arithmetic beside them.
//
// Shared memory: Q and dO of a work tile, and one pipeline in which tiles of K and V alternate (ExactDeltaShared).
#pragma once

#include "kernels/sm90/backward/exact_delta/traits.h"
#include "kernels/sm90/tile_scheduler.cuh"
#include "ptx/math.h"
#include "ptx/pin.h"

namespace flash_attn_ext::sm90 {

// The producer thread.
template <class Traits>
struct ExactDeltaProducer {
  using Shared = ExactDeltaShared<Traits>;

  const ExactDeltaArguments& args;
  Shared& shared;
  typename decltype(Shared::query_pipeline)::State query_state{};
  typename decltype(Shared::key_pipeline)::State key_state{};
  typename decltype(Shared::work_pipeline)::State work_state{};

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (uint32_t index = blockIdx.x; index < args.schedule.num_blocks; index = fetch_work_tile(args.work_counter)) {
      shared.work_pipeline.producer_acquire(work_state);
      ExactDeltaWork& work = shared.work[work_state.stage];
      describe(work, args.schedule.place(index));
      if (work.begin >= work.end) {  // no query of the work tile exists and sees a key
        if constexpr (!Traits::kKeyBias) args.partials[work.index] = 0.0f;
        continue;
      }
      ptx::arrive(shared.work_pipeline.full[work_state.stage]);
      send(work);
      work_state.advance();
    }
    publish_end(shared.work, shared.work_pipeline, work_state);
  }

 private:
  __device__ __forceinline__ void describe(ExactDeltaWork& work, const Place& at) const {
    const attention::BackwardParams& p = args.params;
    const attention::Sequence sequence = p.sequences.at(at.batch);
    const uint32_t head = at.key_head * args.schedule.group + at.head_of_group;
    const auto num_queries = static_cast<int>(sequence.num_queries);
    work.batch = static_cast<int>(at.batch);
    work.first_query = static_cast<int>(first_query_of(args.schedule, at, Traits::kQueries));
    work.index =
        static_cast<int>((at.batch * p.num_heads_q + head) * args.schedule.tiles + work.first_query / Traits::kQueries);
    work.coord = {sequence, head, at.key_head};
    work.begin = INT32_MAX;
    work.end = 0;
#pragma unroll 1
    for (int w = 0; w < Traits::kWarpgroups; ++w) {
      const int first = work.first_query + w * tile::kWarpgroupRows;
      const int last = min(first + tile::kWarpgroupRows, num_queries) - 1;
      TileRange own = {0, 0, 0, 0};
      if (first <= last) {
        own = tile_range<Traits::kKeys, unsigned>(p.visibility.keys_of<int>(first, sequence),
                                                  p.visibility.keys_of<int>(last, sequence));
      }
      work.own[w] = own;
      if (own.empty()) continue;
      work.begin = min(work.begin, own.begin);
      work.end = max(work.end, own.end);
    }
  }

  __device__ __forceinline__ void send(const ExactDeltaWork& work) {
#pragma unroll 1
    for (int tile = work.begin; tile < work.end; ++tile) {
      const int key = static_cast<int>(work.coord.sequence.key_begin) + tile * Traits::kKeys;
      load_keys(work, args.k, key);
      // After K, because the stage of Q and dO is released with the last tile of the previous work tile.
      if (tile == work.begin) load_queries(work);
      load_keys(work, args.v, key);
    }
  }

  __device__ __forceinline__ void load_keys(const ExactDeltaWork& work, const TmaDescriptor& operand, int key) {
    shared.key_pipeline.producer_acquire(key_state);
    ptx::Barrier& full = shared.key_pipeline.full[key_state.stage];
    ptx::arrive_expecting(full, Traits::KeyTile::kBytes);
    shared.keys[key_state.stage].copy(
        operand.map, full,
        {0, key, static_cast<int>(work.coord.key_head) * operand.head_step, work.batch * operand.batch_step});
    key_state.advance();
  }

  __device__ __forceinline__ void load_queries(const ExactDeltaWork& work) {
    shared.query_pipeline.producer_acquire(query_state);
    ptx::Barrier& full = shared.query_pipeline.full[query_state.stage];
    ptx::arrive_expecting(full, 2 * Traits::QueryTile::kBytes);
    const int query = static_cast<int>(work.coord.sequence.query_begin) + work.first_query;
    const auto origin = [&](const TmaDescriptor& operand) {
      return ptx::TmaCoordinate{0, query, static_cast<int>(work.coord.head) * operand.head_step,
                                work.batch * operand.batch_step};
    };
    shared.q.copy(args.q.map, full, origin(args.q));
    shared.dout.copy(args.dout.map, full, origin(args.dout));
    query_state.advance();
  }
};

template <class Traits>
struct ExactDeltaWarpgroup {
  using Shared = ExactDeltaShared<Traits>;
  using Scores = typename Traits::Scores;
  using Where = typename Traits::Where;
  using KeyState = typename decltype(Shared::key_pipeline)::State;
  static constexpr int kThreadRows = Scores::kThreadRows;
  static constexpr int kConsumersBarrier = 1;  // a named barrier; barrier 0 is __syncthreads

  // The thread's share of a row's sums.
  struct RowSums {
    float products = 0.0f;           // P dP
    float derivatives = 0.0f;        // P w
    float weighted_products = 0.0f;  // P dP w
  };

  const ExactDeltaArguments& args;
  Shared& shared;
  const int warpgroup;

  Scores scores;
  Scores gradients;  // dP
  RowSums sums[kThreadRows];
  // Infinite for a query that does not exist, or sees no key. With slopes: times log2(e).
  float lse[kThreadRows];
  float lse_residual[kThreadRows];  // with a key bias: what rounding left out of the LSE, times -log2(e)
  float slope_log2e;
  const float* bias;  // of the head's first key
  typename decltype(Shared::query_pipeline)::State query_state{};
  KeyState key_state{};
  typename decltype(Shared::work_pipeline)::State work_state{};

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (;;) {
      shared.work_pipeline.consumer_wait(work_state);
      const ExactDeltaWork& work = shared.work[work_state.stage];
      if (uniform(work.batch) == ExactDeltaWork::kEnd) break;
      begin(work);
      add_tiles(work);
      finish(work);
      consumer_release(shared.work_pipeline.empty[work_state.stage]);
      work_state.advance();
    }
  }

 private:
  // The warp's first query.
  __device__ __forceinline__ int first_row(const ExactDeltaWork& work) const {
    return work.first_query + warpgroup * tile::kWarpgroupRows + tile::warp() % 4 * 16;
  }

  // Calls function(r, query) for each of the thread's rows that exists, with its place in the batch entry.
  template <class Function>
  __device__ __forceinline__ void for_each_query(const ExactDeltaWork& work, Function&& function) const {
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      const int row = first_row(work) + Scores::row(r);
      if (row < work.coord.sequence.num_queries) function(r, work.coord.sequence.query_begin + row);
    }
  }

  __device__ __forceinline__ void begin(const ExactDeltaWork& work) {
    const attention::BackwardParams& p = args.params;
    [[maybe_unused]] float maximum;
    if constexpr (Traits::kKeyBias) {
      static_assert(Traits::kQueries == attention::KeyBiasMaxima::kQueries);
      maximum = args.key_bias_maxima.of(p, work.coord.sequence, work.coord.head, work.first_query);
      const attention::BroadcastView& view = p.score_mod.bias;
      bias = static_cast<const float*>(view.data) + view.offset({work.batch, work.coord.head, 0, 0});
    } else {
      slope_log2e = p.score_mod.alibi.at<float>(work.batch, work.coord.head) * kLog2e;
    }
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      sums[r] = {};
      lse[r] = INFINITY;
      lse_residual[r] = 0.0f;
    }
    for_each_query(work, [&](int r, int64_t query) {
      const float own = *p.lse.at<const float>(work.batch, work.coord.head, query);
      const float residual =
          p.lse_residual.present() ? *p.lse_residual.at<const float>(work.batch, work.coord.head, query) : 0.0f;
      if (own == -INFINITY) return;
      if constexpr (Traits::kKeyBias) {
        // Of a query that is computed again, the delta of O is as exact as its scores.
        const bool is_exact = fabsf(own - maximum) <= attention::KeyBiasMaxima::kMostDistance;
        lse[r] = is_exact ? own : NAN;
        lse_residual[r] = -kLog2e * residual;
      } else {
        lse[r] = fmaf(own, kLog2e, residual * kLog2e);
      }
    });
    __syncwarp();
  }

  __device__ __forceinline__ void add_tiles(const ExactDeltaWork& work) {
    const int own_begin = uniform(work.own[warpgroup].begin);
    const int own_end = uniform(work.own[warpgroup].end);
    const int end = uniform(work.end);
    shared.query_pipeline.consumer_wait(query_state);
#pragma unroll 1
    for (int tile = uniform(work.begin); tile < end; ++tile) {
      if (tile >= own_begin && tile < own_end) {
        add_tile(work, tile);
      } else {
        drain();
      }
    }
    consumer_release(shared.query_pipeline.empty[query_state.stage]);
    query_state.advance();
  }

  __device__ __forceinline__ void add_tile(const ExactDeltaWork& work, int tile) {
    issue_gemm(scores, shared.q);
    KeyState of_keys = key_state;
    key_state.advance();
    issue_gemm(gradients, shared.dout);
    ptx::wait_wgmma<1>();
    ptx::pin_registers(scores.c[0]);
    consumer_release(shared.key_pipeline.empty[of_keys.stage]);
    const Where where = {args.params, work.coord, first_row(work), tile * Traits::kKeys};
    if (!work.own[warpgroup].full(tile)) where.hide_invisible(scores);
    __syncwarp();
    if constexpr (Traits::kKeyBias) {
      add_products(tile * Traits::kKeys, static_cast<int>(work.coord.sequence.num_keys));
    } else {
      add_sums(work, tile);
    }
  }

  // P beside a key bias, and the sum of P dP. Keys that the sequence does not have are hidden, and take the bias of its
  // last key.
  __device__ __forceinline__ void add_products(int first_key, int num_keys) {
#pragma unroll
    for (int j = 0; j < Scores::kColumnTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float of_key = __ldg(bias + min(first_key + Scores::column(j, e), num_keys - 1));
#pragma unroll
        for (int r = 0; r < kThreadRows; ++r) {
          // The difference of two large numbers comes before the factor log2(e), which would round both.
          float& score = scores.at(r, j, e);
          score = ptx::exp2(fmaf(of_key - lse[r], kLog2e, fmaf(score, args.scale_log2e, lse_residual[r])));
        }
      }
    }
    await_products();
#pragma unroll
    for (int j = 0; j < Scores::kColumnTiles; ++j) {
#pragma unroll
      for (int r = 0; r < kThreadRows; ++r) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float weight = scores.at(r, j, e);
          sums[r].products += weight == 0.0f ? 0.0f : weight * gradients.at(r, j, e);
        }
      }
    }
    __syncwarp();
  }

  // Waits for dP.
  __device__ __forceinline__ void await_products() {
    ptx::wait_wgmma<0>();
    ptx::pin_registers(gradients.c[0]);
    consumer_release(shared.key_pipeline.empty[key_state.stage]);
    key_state.advance();
  }

  __device__ __forceinline__ void add_sums(const ExactDeltaWork& work, int tile) {
    float distances[kThreadRows];
    const auto diagonal = static_cast<int>(args.params.visibility.diagonal(work.coord.sequence));
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      const int query = first_row(work) + Scores::row(r);
      distances[r] = static_cast<float>(tile * Traits::kKeys + Scores::column(0, 0) - query - diagonal);
    }
    // Where no query sees a later key, these have a weight of 0, and the sign of their w does not matter.
    const int last_key = tile * Traits::kKeys + Traits::kKeys - 1;
    const int first_diagonal = work.first_query + warpgroup * tile::kWarpgroupRows + diagonal;
    if (args.params.visibility.right <= 0 || uniform(last_key) <= uniform(first_diagonal)) {
      add_sums<true>(distances);
    } else {
      add_sums<false>(distances);
    }
  }

  // P, and the sums. distances: key - query - diagonal of the first element of each of the thread's rows. kIsBefore: no
  // visible key comes after the diagonal.
  template <bool kIsBefore>
  __device__ __forceinline__ void add_sums(const float (&distances)[kThreadRows]) {
    for_each_derivative<kIsBefore>(distances, [&](int r, int j, int e, float w) {
      float& score = scores.at(r, j, e);
      score = ptx::exp2(fmaf(score, args.scale_log2e, fmaf(w, slope_log2e, -lse[r])));
    });
    await_products();
    for_each_derivative<kIsBefore>(distances, [&](int r, int j, int e, float w) {
      const float weight = scores.at(r, j, e);
      // Where the weight is 0, the key may be hidden, or has vanished: dP may be anything, and adds nothing.
      const float product = weight == 0.0f ? 0.0f : weight * gradients.at(r, j, e);
      sums[r].products += product;
      sums[r].derivatives = fmaf(weight, w, sums[r].derivatives);
      sums[r].weighted_products = fmaf(product, w, sums[r].weighted_products);
    });
    __syncwarp();
  }

  // Calls function(r, j, e, w) for each element that the thread holds.
  template <bool kIsBefore, class Function>
  __device__ __forceinline__ static void for_each_derivative(const float (&distances)[kThreadRows],
                                                             Function&& function) {
#pragma unroll
    for (int j = 0; j < Scores::kColumnTiles; ++j) {
#pragma unroll
      for (int r = 0; r < kThreadRows; ++r) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float distance = distances[r] + static_cast<float>(8 * j + e);
          function(r, j, e, kIsBefore ? distance : -fabsf(distance));
        }
      }
    }
  }

  // to = queries . keys^T, with the current stage of the pipeline.
  __device__ __forceinline__ void issue_gemm(Scores& to, const typename Traits::QueryTile& queries) {
    key_state.stage = uniform(key_state.stage);
    shared.key_pipeline.consumer_wait(key_state);
    tile::issue_rows_gemm(to, tile::SmemOperand(queries).from_row(warpgroup * tile::kWarpgroupRows),
                          tile::SmemOperand(shared.keys[0]).after(key_state.stage));
  }

  // Drains a key tile that only the other warpgroup's queries see.
  __device__ __forceinline__ void drain() {
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      shared.key_pipeline.consumer_wait(key_state);
      consumer_release(shared.key_pipeline.empty[key_state.stage]);
      key_state.advance();
    }
  }

  __device__ __forceinline__ void finish(const ExactDeltaWork& work) {
    if constexpr (Traits::kKeyBias) {
      store_delta(work);
    } else {
      store_partial(work);
    }
  }

  __device__ __forceinline__ void store_delta(const ExactDeltaWork& work) {
    const attention::BackwardParams& p = args.params;
    float deltas[kThreadRows];
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) deltas[r] = tile::quad_sum(sums[r].products);
    for_each_query(work, [&](int r, int64_t query) {
      const float dlse = p.dlse.present() ? *p.dlse.at<const float>(work.batch, work.coord.head, query) : 0.0f;
      if (tile::lane() % 4 == 0) *p.delta.at<float>(work.batch, work.coord.head, query) = deltas[r] - dlse;
    });
    __syncwarp();
  }

  // Adds up what the work tile's queries contribute to the slope's gradient, in a fixed order, and stores it.
  __device__ __forceinline__ void store_partial(const ExactDeltaWork& work) {
    const attention::BackwardParams& p = args.params;
    float of_rows[kThreadRows] = {};
    RowSums complete[kThreadRows];
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      complete[r] = {tile::quad_sum(sums[r].products), tile::quad_sum(sums[r].derivatives),
                     tile::quad_sum(sums[r].weighted_products)};
    }
    for_each_query(work, [&](int r, int64_t query) {
      const float dlse = p.dlse.present() ? *p.dlse.at<const float>(work.batch, work.coord.head, query) : 0.0f;
      const float delta = complete[r].products - dlse;
      // The dlse of a row without keys may be anything.
      const bool has_weights = complete[r].derivatives != 0.0f;
      of_rows[r] = complete[r].weighted_products - (has_weights ? delta * complete[r].derivatives : 0.0f);
    });
    __syncwarp();
    float of_warp = 0.0f;
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) of_warp += of_rows[r];
    if (tile::lane() % 4 != 0) of_warp = 0.0f;  // the four threads of a row have the same
    of_warp = tile::sum_over_lanes<tile::kWarpSize>(of_warp);
    float(&of_warps)[Shared::kComputingWarps] = shared.sums[work_state.stage];
    const int warp = warpgroup * 4 + tile::warp() % 4;
    if (tile::lane() == 0) of_warps[warp] = of_warp;
    ptx::sync_named(kConsumersBarrier, Traits::kComputingThreads);
    if (warp == 0 && tile::lane() == 0) {
      float sum = of_warps[0];
#pragma unroll
      for (int i = 1; i < Shared::kComputingWarps; ++i) sum += of_warps[i];
      args.partials[work.index] = sum;
    }
    __syncwarp();
  }
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    exact_delta_kernel(const __grid_constant__ ExactDeltaArguments args) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<ExactDeltaShared<Traits>*>(shared_memory);
  run_roles<ExactDeltaProducer<Traits>, ExactDeltaWarpgroup<Traits>,
            RoleRegisters{Traits::kConfig.producer_registers, Traits::kConfig.consumer_registers}>(args, shared);
}

}  // namespace flash_attn_ext::sm90
