// How dQ of visits goes to memory: four warps that compute it (sm90/backward/dq_outlet.cuh), two adders (dq_adders.cuh)
// and the copy engine, each step at a random time, beside other blocks that add to the same sums. Nobody reads what is
// not there, overwrites what is still read, or waits for ever, and every visit is added once, in its turn.
#include "kernels/sm90/backward/dq_adders.cuh"
#include "kernels/sm90/backward/dq_outlet.cuh"

namespace {

using namespace flash_attn_ext;
using namespace flash_attn_ext::sm90;

// Of this block's. Each adds to sums of its own, where `place` visitors of other blocks come before.
struct BlocksVisit {
  int place;
  bool is_last;
};

template <class Traits>
class Block {
 public:
  Block(std::vector<BlocksVisit> visits, uint32_t seed)
      : visits_(std::move(visits)), fibers_(seed), sums_(visits_.size() * kFloats), turns_(visits_.size()) {
    arguments_.workspace = {.dq_sums = sums_.data(), .turns = turns_.data()};
    shared_.dq_ring.init(kDqWarps);
    dq_warpgroup_barrier = {};
  }

  bool is_right() {
    device::Fibers::current_fibers = &fibers_;
    ptx::CopyEngine::current = &engine_;
    for (int warp = 0; warp < kDqWarps; ++warp) start([this] { compute(); }, 32u * static_cast<unsigned>(warp));
    for (int adder = 0; adder < kDqAdders; ++adder) {
      start([this, adder] { DqAdder<Traits>{arguments_, shared_, adder}.run(); });
    }
    for (int visit = 0; visit < static_cast<int>(visits_.size()); ++visit) {
      start([this, visit] { visit_before(visit); });
      if (!visits_[static_cast<size_t>(visit)].is_last) start([this, visit] { visit_after(visit); });
    }
    fibers_.start([this] { engine_.run(); });
    return fibers_.run() ? is_right_ : fails("somebody waits for ever");
  }

 private:
  static constexpr int kFloats = Traits::kDqPieces * Traits::kDqPieceFloats;
  using Dq = tile::WarpgroupAccumulator<Traits::kTile.dq_columns>;

  void start(std::function<void()> body, unsigned thread = 0) {
    ++engine_.users;
    fibers_.start(
        [this, body] {
          body();
          --engine_.users;
        },
        thread);
  }

  bool fails(const char* what) {
    std::printf("%d pieces, visits announced %d, %zu visits: %s\n", Traits::kDqPieces, Traits::kAnnouncesVisits,
                visits_.size(), what);
    return is_right_ = false;
  }

  // Whole numbers, whose sums are exact.
  static float own(int visit, int piece, int thread, int element) {
    return static_cast<float>(1 + visit + 100 * (piece + 2 * (thread / 32 + 4 * element)));
  }
  static float of_others(int place) { return static_cast<float>(10'000 * (place + 1)); }
  static float of_others_before(int place) {
    float sum = 0;
    for (int before = 0; before < place; ++before) sum += of_others(before);
    return sum;
  }

  // As DqWarpgroup::add calls it (sm90/backward/dq_warpgroup.cuh).
  void compute() {
    const int thread = static_cast<int>(threadIdx.x);
    DqOutlet<Traits> outlet{arguments_, shared_};
    for (int visit = 0; visit < static_cast<int>(visits_.size()); ++visit) {
      const auto [place, is_last] = visits_[static_cast<size_t>(visit)];
      Dq dq;
      outlet.begin(visit, place, is_last);
      for (int piece = 0; piece < Traits::kDqPieces; ++piece) {
        outlet.begin_piece(visit, place, piece, is_last);
        device::step();
        for (int e = 0; e < 4; ++e) dq.c[0][0][e] = own(visit, piece, thread, e);
        if (!is_last) {
          outlet.leave(dq, piece);
          continue;
        }
        outlet.add_sums(dq, visit, place, piece);
        for (int e = 0; e < 4; ++e) {
          if (dq.c[0][0][e] != own(visit, piece, thread, e) + of_others_before(place)) fails("sums of a last visitor");
        }
      }
      outlet.finish(visit, place, is_last);
    }
    outlet.end();
  }

  // Visitors of other blocks, in all elements.
  void visit_before(int visit) {
    for (int place = 0; place < visits_[static_cast<size_t>(visit)].place; ++place) {
      for (int wait = fibers_.below(40); wait > 0; --wait) fibers_.yield();
      float* const sums = sums_.data() + visit * kFloats;
      for (int i = 0; i < kFloats; ++i) sums[i] = of_others(place) + (place == 0 ? 0 : sums[i]);
      turns_[static_cast<size_t>(visit)] = place + 1;
    }
  }

  // The next visitor reads what is there when its turn has come.
  void visit_after(int visit) {
    const int place = visits_[static_cast<size_t>(visit)].place;
    while (turns_[static_cast<size_t>(visit)] != place + 1) fibers_.yield();
    const float* sums = sums_.data() + visit * kFloats;
    for (int piece = 0; piece < Traits::kDqPieces; ++piece, sums += Traits::kDqPieceFloats) {
      for (int thread = 0; thread < tile::kWarpgroupSize; thread += 32) {
        for (int e = 0; e < 4; ++e) {
          const float expected = of_others_before(place) + own(visit, piece, thread, e);
          if (sums[thread * 4 + e] != expected) fails("sums in memory");
        }
      }
    }
  }

  std::vector<BlocksVisit> visits_;
  device::Fibers fibers_;
  ptx::CopyEngine engine_;
  BackwardArguments arguments_{};
  BackwardShared<Traits> shared_{};
  std::vector<float> sums_;
  std::vector<int> turns_;
  bool is_right_ = true;
};

template <int kPieces, bool kAnnounces>
bool all_are_right() {
  for (uint32_t seed = 0; seed < 60; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&](int bound) { return std::uniform_int_distribution<int>(0, bound - 1)(random); };
    const int share_of_last = std::vector{0, 10, 30, 60, 100}[static_cast<size_t>(below(5))];
    std::vector<BlocksVisit> visits;
    for (int count = below(20); count > 0; --count) {
      visits.push_back({.place = below(3), .is_last = below(100) < share_of_last});
    }
    if (!Block<SmallTraits<kPieces, kAnnounces>>(visits, seed).is_right()) return false;
  }
  return true;
}

}  // namespace

int main() {
  return all_are_right<1, true>() && all_are_right<2, true>() && all_are_right<1, false>() && all_are_right<2, false>()
             ? 0
             : 1;
}
