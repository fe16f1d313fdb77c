// How the partial dQ of iterations reach memory: the four warps that compute them (key_stationary/dq_epilogue.cuh), two
// reducer warps (dq_reducers.cuh) and TMA, with each step at a random time, beside other CTAs that add to the same
// accumulators. No thread reads what has not been written, overwrites what is still read, or waits forever. Every
// partial dQ is added once, at its rank.
#include "kernels/sm90/backward/key_stationary/dq_epilogue.cuh"
#include "kernels/sm90/backward/key_stationary/dq_reducers.cuh"

namespace {

using namespace flash_attn_ext;
using namespace flash_attn_ext::sm90;

// An iteration of this CTA. Each has an accumulator of its own, to which `rank` contributors of other CTAs add before.
struct CtaIteration {
  int rank;
  bool is_last;
};

template <class Traits>
class Cta {
 public:
  Cta(std::vector<CtaIteration> iterations, uint32_t seed)
      : iterations_(std::move(iterations)),
        fibers_(seed),
        sums_(iterations_.size() * kFloats),
        semaphores_(iterations_.size()) {
    arguments_.workspace = {.dq_sums = sums_.data(), .dq_semaphores = semaphores_.data()};
    shared_.dq_pipeline.init(kDqWarps);
    dq_warpgroup_barrier = {};
  }

  bool is_right() {
    device::Fibers::current_fibers = &fibers_;
    ptx::Tma::current = &tma_;
    for (int warp = 0; warp < kDqWarps; ++warp) start([this] { compute(); }, 32u * static_cast<unsigned>(warp));
    for (int reducer = 0; reducer < kDqReducers; ++reducer) {
      start([this, reducer] { DqReducer<Traits>{arguments_, shared_, reducer}.run(); });
    }
    for (int iteration = 0; iteration < static_cast<int>(iterations_.size()); ++iteration) {
      start([this, iteration] { add_before(iteration); });
      if (!iterations_[static_cast<size_t>(iteration)].is_last) start([this, iteration] { read_after(iteration); });
    }
    fibers_.start([this] { tma_.run(); });
    return fibers_.run() ? is_right_ : fails("a thread waits forever");
  }

 private:
  static constexpr int kFloats = Traits::kDqSlices * Traits::kDqSliceFloats;
  using Dq = tile::WarpgroupAccumulator<Traits::kConfig.tile.dq_columns>;

  void start(std::function<void()> body, unsigned thread = 0) {
    ++tma_.users;
    fibers_.start(
        [this, body] {
          body();
          --tma_.users;
        },
        thread);
  }

  bool fails(const char* what) {
    std::printf("%d slices, pre-signalled %d, %zu iterations: %s\n", Traits::kDqSlices, Traits::kConfig.pre_signals_dq,
                iterations_.size(), what);
    return is_right_ = false;
  }

  // Whole numbers, whose sums are exact.
  static float own(int iteration, int slice, int thread, int element) {
    return static_cast<float>(1 + iteration + 100 * (slice + 2 * (thread / 32 + 4 * element)));
  }
  static float of_others(int rank) { return static_cast<float>(10'000 * (rank + 1)); }
  static float of_others_before(int rank) {
    float sum = 0;
    for (int before = 0; before < rank; ++before) sum += of_others(before);
    return sum;
  }

  // As DqWarpgroup::add calls the epilogue (key_stationary/dq_warpgroup.cuh).
  void compute() {
    const int thread = static_cast<int>(threadIdx.x);
    DqEpilogue<Traits> epilogue{arguments_, shared_};
    for (int iteration = 0; iteration < static_cast<int>(iterations_.size()); ++iteration) {
      const auto [rank, is_last] = iterations_[static_cast<size_t>(iteration)];
      Dq dq;
      epilogue.begin(iteration, rank, is_last);
      for (int slice = 0; slice < Traits::kDqSlices; ++slice) {
        epilogue.begin_slice(iteration, rank, slice, is_last);
        device::step();
        for (int e = 0; e < 4; ++e) dq.c[0][0][e] = own(iteration, slice, thread, e);
        if (!is_last) {
          epilogue.store_partial(dq, slice);
          continue;
        }
        epilogue.add_sums(dq, iteration, rank, slice);
        for (int e = 0; e < 4; ++e) {
          if (dq.c[0][0][e] != own(iteration, slice, thread, e) + of_others_before(rank))
            fails("the accumulator of a last contributor");
        }
      }
      epilogue.finish(iteration, rank, is_last);
    }
    epilogue.end();
  }

  // Contributors of other CTAs, which add to all elements.
  void add_before(int iteration) {
    for (int rank = 0; rank < iterations_[static_cast<size_t>(iteration)].rank; ++rank) {
      for (int wait = fibers_.below(40); wait > 0; --wait) fibers_.yield();
      float* const sums = sums_.data() + iteration * kFloats;
      for (int i = 0; i < kFloats; ++i) sums[i] = of_others(rank) + (rank == 0 ? 0 : sums[i]);
      semaphores_[static_cast<size_t>(iteration)] = rank + 1;
    }
  }

  // The next contributor reads the accumulator when the semaphore has reached its rank.
  void read_after(int iteration) {
    const int rank = iterations_[static_cast<size_t>(iteration)].rank;
    while (semaphores_[static_cast<size_t>(iteration)] != rank + 1) fibers_.yield();
    const float* sums = sums_.data() + iteration * kFloats;
    for (int slice = 0; slice < Traits::kDqSlices; ++slice, sums += Traits::kDqSliceFloats) {
      for (int thread = 0; thread < tile::kWarpgroupSize; thread += 32) {
        for (int e = 0; e < 4; ++e) {
          const float expected = of_others_before(rank) + own(iteration, slice, thread, e);
          if (sums[thread * 4 + e] != expected) fails("the accumulator in memory");
        }
      }
    }
  }

  std::vector<CtaIteration> iterations_;
  device::Fibers fibers_;
  ptx::Tma tma_;
  KeyStationaryArguments arguments_{};
  KeyStationaryShared<Traits> shared_{};
  std::vector<float> sums_;
  std::vector<int> semaphores_;
  bool is_right_ = true;
};

template <int kSlices, bool kPreSignals>
bool all_are_right() {
  for (uint32_t seed = 0; seed < 60; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&](int bound) { return std::uniform_int_distribution<int>(0, bound - 1)(random); };
    const int share_of_last = std::vector{0, 10, 30, 60, 100}[static_cast<size_t>(below(5))];
    std::vector<CtaIteration> iterations;
    for (int count = below(20); count > 0; --count) {
      iterations.push_back({.rank = below(3), .is_last = below(100) < share_of_last});
    }
    if (!Cta<SmallTraits<kSlices, kPreSignals>>(iterations, seed).is_right()) return false;
  }
  return true;
}

}  // namespace

int main() {
  return all_are_right<1, true>() && all_are_right<2, true>() && all_are_right<1, false>() && all_are_right<2, false>()
             ? 0
             : 1;
}
