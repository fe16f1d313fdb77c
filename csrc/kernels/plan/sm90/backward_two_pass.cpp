// Plans Hopper's two-pass backward: the memory of materialised scores, in launches, query chunks and key chunks.
#include "attention/division.h"
#include "kernels/config/two_pass.h"
#include "kernels/plan/mask_tiles.h"
#include "kernels/plan/plan.h"
#include "kernels/plan/sm80/sm80.h"
#include "kernels/plan/sm90/sm90.h"
#include "kernels/schedule/materialised_tiles.h"

namespace flash_attn_ext::plan {
namespace {

using attention::BackwardParams;

// The query tiles of a head, in all sequences. A packed sequence begins at a tile of its own.
int64_t count_query_tiles(const BackwardParams& p) {
  return MaterialisedTiles::rows_of_matrix(p) * (is_packed(p) ? 1 : p.batch);
}

// Divides the scores of a call among launches, each of which materialises some of them.
class MaterialisedLaunches {
 public:
  MaterialisedLaunches(const BackwardParams& p, const sm90::GemmTile& gemm, const Limits& limits)
      : p_(p),
        tiles_(MaterialisedTiles::of(p)),
        sms_(limits.sms),
        pairs_of_matrix_(is_packed(p) ? p.batch : 1),
        matrices_(p.batch * p.num_heads_k / pairs_of_matrix_),
        group_(p.queries_per_key_head()),
        room_(limits.max_materialised_bytes / (2 * group_ * MaterialisedTiles::kBytes)),
        key_chunk_step_(gemm.warpgroups),
        key_tiles_(is_packed(p) ? p.sequences.total_k / gemm.keys() + p.batch
                                : attention::ceil_div(p.sequences.max_seqlen_k, gemm.keys())),
        gemm_ctas_(std::max<int64_t>(count_parts(p) * key_tiles_, 1)) {}

  // Returns no launches where the call is for other kernels.
  BackwardPlan::Materialised divide() const {
    const int64_t whole = std::min(room_ / tiles_.in_matrix, matrices_);
    const int64_t in_chunks = count_matrices_in_chunks();
    if (whole < in_chunks && can_have_chunks()) return divide_into_chunks(in_chunks);
    if (whole == 0) return {};
    BackwardPlan::Materialised materialised = launches_of(in_twos(whole));
    materialised.bytes_of_matrices = bytes_of(materialised, tiles_.in_matrix);
    return materialised;
  }

  // The column parts of dK and dV, each of which takes a work tile of the GEMM kernel.
  static int64_t count_parts(const BackwardParams& p) {
    return (p.dk.data != nullptr ? sm90::num_column_parts(p.head_dim_qk) : 0) +
           (p.dv.data != nullptr ? sm90::num_column_parts(p.head_dim_v) : 0);
  }

 private:
  // How many rows of each of `matrices` matrices fit the memory, if every row sees `width` tiles.
  int64_t rows_of_chunk(int64_t matrices) const {
    const int64_t rows = room_ / (matrices * tiles_.width) - (is_packed(p_) ? MaterialisedTiles::kBlockRows - 1 : 0);
    return std::max<int64_t>(rows, 0) / MaterialisedTiles::kBlockRows * MaterialisedTiles::kBlockRows;
  }

  // Whether query chunks are worthwhile. A chunk that gives the SMs too little to do is slower than kernels that
  // compute scores twice.
  bool can_have_chunks() const {
    const int64_t blocks = rows_of_chunk(1) / MaterialisedTiles::kBlockRows * group_;
    if (blocks < std::max<int64_t>(sms_ / 4, 1) && !can_have_key_chunks()) return false;
    if (2 * tiles_.before<int64_t>(tiles_.rows) > INT32_MAX) return false;  // before() doubles before it halves
    return !(is_packed(p_) && p_.dbias.present());  // sequences share a tile of the bias, but not a chunk
  }

  // The rows of each matrix whose CTAs fit the SMs once.
  int rows_of_wave(int64_t matrices) const {
    return static_cast<int>(std::max<int64_t>(sms_ / (matrices * group_), 1)) * MaterialisedTiles::kBlockRows;
  }

  // The most key tiles of a key chunk of so many rows, in whole tiles of the GEMM kernel.
  int most_key_chunk_tiles(int64_t matrices, int rows) const {
    return static_cast<int>(std::min<int64_t>(room_ / (matrices * rows), tiles_.width) / key_chunk_step_ *
                            key_chunk_step_);
  }

  // Whether query chunks may be divided into key chunks. There must be room for so many keys that partial dQ, which
  // one key chunk leaves to the next, is a small part of what is read and written, and that the GEMM kernel fills the
  // SMs.
  bool can_have_key_chunks() const {
    constexpr int64_t kKeys = 4096;
    if (is_packed(p_) || p_.dbias.present() || tiles_.width < MaterialisedTiles::num_tiles(p_.sequences.max_seqlen_k)) {
      return false;
    }
    const int most = most_key_chunk_tiles(1, rows_of_wave(1));
    return most * MaterialisedTiles::kRows >= kKeys && most / key_chunk_step_ * count_parts(p_) >= sms_;
  }

  // As many matrices as let the GEMM kernel fill the SMs more than once. A chunk must have enough queries to make
  // partial sums, which one chunk hands on to the next, a small part of what is read and written. There is at least one
  // matrix.
  int64_t count_matrices_in_chunks() const {
    constexpr int64_t kWaves = 2;
    constexpr int64_t kQueries = 8192;  // of all heads of a KV group
    int64_t matrices = std::min(attention::ceil_div(kWaves * sms_, gemm_ctas_), matrices_);
    while (matrices > 1 && rows_of_chunk(matrices) * MaterialisedTiles::kRows * group_ < kQueries) --matrices;
    return matrices;
  }

  BackwardPlan::Materialised divide_into_chunks(int64_t matrices) const {
    BackwardPlan::Materialised materialised = launches_of(matrices);
    const int64_t pairs = materialised.pairs_per_launch;
    const int64_t room = room_ * pairs_of_matrix_ / pairs;
    MaterialisedTiles tiles = tiles_;
    const int most = equal_rows(pairs);
    const bool may_divide_keys = can_have_key_chunks();
    int64_t launches = 0;
    // Chunks are cut from the last row on. In causal calls its rows are the longest, and those of the remainder are
    // short.
    for (int end = tiles.rows; end > 0; end = tiles.chunk_begin) {
      tiles.choose_chunk(p_, end, room);
      const int rows = std::min(in_whole_waves(end - tiles.chunk_begin, pairs), most);
      const int of_key_chunks = may_divide_keys ? rows_with_key_chunks(end, pairs / pairs_of_matrix_) : 0;
      const bool has_key_chunks = 4 * rows < 3 * of_key_chunks;  // for less, a second launch costs as much as idle SMs
      tiles.set_chunk(p_, whole_blocks_before(end, has_key_chunks ? of_key_chunks : rows), end);
      const int key_chunk = has_key_chunks ? equal_key_chunk_tiles(tiles, pairs / pairs_of_matrix_) : 0;
      materialised.chunks.insert(materialised.chunks.begin(), {end, key_chunk});
      for_each_key_chunk(p_, tiles, key_chunk, [&](const MaterialisedTiles& launch) {
        ++launches;
        materialised.bytes_of_matrices =
            std::max(materialised.bytes_of_matrices, bytes_of(materialised, launch.in_matrix));
      });
      if (has_key_chunks) {
        materialised.rows_with_key_chunks =
            std::max(materialised.rows_with_key_chunks, pairs / pairs_of_matrix_ * group_ * tiles.rows_of_chunk());
      }
    }
    materialised.launches *= launches;
    materialised.key_tiles_of_matrix = key_tiles_;
    return materialised;
  }

  static int whole_blocks_before(int end, int rows) {
    return (end - rows + 1) / MaterialisedTiles::kBlockRows * MaterialisedTiles::kBlockRows;
  }

  // The rows of a query chunk that ends at row `end` and is divided into key chunks: one wave of CTAs. Where all rows
  // are equally long, query chunks share the rows equally, so that none is short.
  int rows_with_key_chunks(int end, int64_t matrices) const {
    constexpr int kRows = MaterialisedTiles::kBlockRows;
    const int wave = rows_of_wave(matrices) / kRows;
    if (p_.visibility.one_sided()) return std::min(wave * kRows, end);
    const int64_t share = attention::even_share(attention::ceil_div(tiles_.rows, kRows), wave) * kRows;
    return static_cast<int>(std::min<int64_t>(share, end));
  }

  // The key tiles of each key chunk, where these are about as wide.
  int equal_key_chunk_tiles(const MaterialisedTiles& chunk, int64_t matrices) const {
    const int seen = static_cast<int>(attention::ceil_div(chunk.seen_keys(), key_chunk_step_));
    const int most = std::max(most_key_chunk_tiles(matrices, chunk.rows_of_chunk()) / key_chunk_step_, 1);
    return static_cast<int>(attention::even_share(seen, most)) * key_chunk_step_;
  }

  // The rows of a chunk where all chunks are about as long. The CTAs of a short remainder would take as long as those
  // of a longer chunk.
  int equal_rows(int64_t pairs) const {
    constexpr int kRows = MaterialisedTiles::kBlockRows;
    if (p_.visibility.one_sided()) return tiles_.rows;
    const int most = in_whole_waves(static_cast<int>(rows_of_chunk(pairs / pairs_of_matrix_)), pairs);
    return static_cast<int>(attention::even_share(attention::ceil_div(tiles_.rows, kRows), std::max(most / kRows, 1))) *
           kRows;
  }

  // Rounds to an even number of heads in causal calls. Where L2 holds one head at a time, the long tiles of every
  // second head follow the short ones of the head before it, and their CTAs end together
  // (docs/kernels/log/sm90_backward.md, "Figures behind plans").
  int64_t in_twos(int64_t matrices) const {
    const bool evens_out = p_.visibility.one_sided() && !is_packed(p_) && group_ % 2 != 0;
    return evens_out && matrices > 1 && matrices < matrices_ ? matrices / 2 * 2 : matrices;
  }

  // `rows`, or fewer where their CTAs would leave many SMs idle at the end.
  int in_whole_waves(int rows, int64_t pairs) const {
    const int64_t blocks_of_rows = pairs / pairs_of_matrix_ * group_;
    const int64_t blocks = attention::ceil_div(rows, MaterialisedTiles::kBlockRows) * blocks_of_rows;
    const int64_t waves = blocks / sms_;
    const int64_t idle = (waves + 1) * sms_ - blocks;
    const int64_t fitting = waves * sms_ / blocks_of_rows * MaterialisedTiles::kBlockRows;
    return idle * 10 < blocks || fitting == 0 ? rows : static_cast<int>(fitting);
  }

  BackwardPlan::Materialised launches_of(int64_t matrices) const {
    BackwardPlan::Materialised materialised;
    materialised.pairs_per_launch = in_equal_launches(p_, matrices * pairs_of_matrix_);
    materialised.launches = attention::ceil_div(p_.batch * p_.num_heads_k, materialised.pairs_per_launch);
    return materialised;
  }
  int64_t bytes_of(const BackwardPlan::Materialised& materialised, int64_t in_matrix) const {
    return materialised.pairs_per_launch / pairs_of_matrix_ * group_ * in_matrix * MaterialisedTiles::kBytes;
  }

  const BackwardParams& p_;
  MaterialisedTiles tiles_;
  int64_t sms_;
  int64_t pairs_of_matrix_;  // a matrix holds one pair or, in a packed batch, all pairs of a key head
  int64_t matrices_;         // of each head of a KV group
  int64_t group_;
  int64_t room_;        // for tiles of P, of each head of a KV group
  int key_chunk_step_;  // key tiles of a tile of the GEMM kernel
  int64_t key_tiles_;   // of a matrix
  int64_t gemm_ctas_;   // work tiles of the GEMM kernel, of a matrix
};

constexpr int kNoRow = -1;

// The row of the cheapest head dims that hold the call's, and of the score mode that does what the call needs, if there
// is one.
int choose_row(const BackwardParams& p, const Limits& limits) {
  const auto row_of = [&](ScoreMode score) {
    sm90::HeadDims cheapest{};
    int row = 0;
    for (const sm90::TwoPassConfig& config : sm90::kTwoPassConfigs) {
      if (cheapest == sm90::HeadDims{} && config.dims.fit(p.head_dim_qk, p.head_dim_v)) cheapest = config.dims;
      if (config.dims == cheapest && config.score == score) return row;
      ++row;
    }
    return kNoRow;
  };
  const ScoreMode score = score_mode_sm90(p, limits);
  const int row = row_of(score);
  if (row != kNoRow) return row;
  int without_bias = kNoRow;
  if (!p.score_mod.bias.present() && !p.score_mod.hides_keys()) {
    without_bias = row_of(ScoreMode::kGenericWithoutBiasMask);
  } else if (!p.score_mod.bias.present() && has_bits_of_mask(p)) {
    without_bias = row_of(ScoreMode::kGenericWithoutBias);
  }
  return without_bias != kNoRow ? without_bias : row_of(ScoreMode::kGeneric);
}

// The float32 sums that key tiles hand on from chunk to chunk.
int64_t key_sums_bytes(const BackwardParams& p, const BackwardPlan& plan, const sm90::GemmTile& tile) {
  const int64_t matrices = plan.materialised.pairs_per_launch / (is_packed(p) ? p.batch : 1);
  const int64_t sums =
      matrices * plan.materialised.key_tiles_of_matrix * MaterialisedLaunches::count_parts(p) * tile.keys();
  const int columns = std::min(std::max(plan.dkdv_head_dim, plan.head_dim_v), sm90::kColumnsOfPart);
  return sums * columns * int64_t{sizeof(float)};
}

}  // namespace

std::optional<BackwardPlan> plan_backward_two_pass(const BackwardParams& p, const Limits& limits) {
  const int row = choose_row(p, limits);
  if (row == kNoRow) return std::nullopt;
  const sm90::HeadDims dims = sm90::kTwoPassConfigs[row].dims;
  const ScoreMode score = sm90::kTwoPassConfigs[row].score;
  BackwardPlan plan;
  plan.row = row;
  plan.query_tiles_of_head = count_query_tiles(p);
  const sm90::GemmTile gemm = sm90::gemm_tile(dims);
  plan.materialised = MaterialisedLaunches(p, gemm, limits).divide();
  if (plan.materialised.launches == 0) return std::nullopt;
  plan.kernels = BackwardKernels::kTwoPass;
  plan.delta = DeltaSource::kSharedKernel;
  plan.dq_head_dim = plan.dkdv_head_dim = dims.qk;
  plan.head_dim_v = dims.v;
  plan.dq_score = plan.dkdv_score = score;
  if (p.dbias.present()) {
    plan.dbias = BiasGradientSource::kMaterialised;
    plan.writes_dbias_once = launches_hold_sums_of_dbias(p, plan.materialised.pairs_per_launch);
  }
  plan.nan_repair = NanRepair::kOwnLaunch;
  // What streams past tiles shares L2 with the materialised tiles (docs/kernels/log/sm90_backward.md, "Figures behind
  // plans").
  plan.l2_bytes = limits.l2_bytes * 3 / 5;
  plan.persistent_ctas = limits.sms;
  const int64_t query_flags = 4 * attention::ceil_div(p.sequences.max_seqlen_q, MaterialisedTiles::kRows);
  const int64_t key_flags = gemm.flags() * attention::ceil_div(p.sequences.max_seqlen_k, gemm.keys());
  // For each launch: of query tiles, then of key tiles, then of those of dQ where it is a GEMM of its own.
  const int64_t counters = sm90::kTwoPassConfigs[row].dq_from_tiles ? 3 : 2;
  BackwardPlan::Workspace& parts = plan.workspace;
  parts.delta = append(parts.bytes, statistic_bytes(p));
  parts.materialised_scores = append(parts.bytes, 2 * plan.materialised.bytes_of_matrices);
  parts.statistics = append(parts.bytes, p.num_heads_q * plan.query_tiles_of_head * MaterialisedTiles::kRows *
                                             MaterialisedTiles::kStatistics * int64_t{sizeof(float)});
  if (p.score_mod.hides_keys()) {
    parts.mask_tiles = append(parts.bytes, mask_tiles_bytes(p));
    if (p.score_mod.mask.present() && score != ScoreMode::kGeneric)
      parts.mask_bits = append(parts.bytes, mask_bits_bytes(p));
  }
  parts.work_counter = append(parts.bytes, plan.materialised.launches * counters * int64_t{sizeof(uint32_t)});
  if (!plan.materialised.chunks.empty()) parts.key_sums = append(parts.bytes, key_sums_bytes(p, plan, gemm));
  // Partial dQ, whole column parts of it where it is a GEMM of its own.
  const int64_t dq_columns = sm90::kTwoPassConfigs[row].dq_from_tiles
                                 ? sm90::num_column_parts(p.head_dim_qk) * int64_t{sm90::kColumnsOfPart}
                                 : dims.qk;
  parts.query_sums = append(parts.bytes, plan.materialised.rows_with_key_chunks * MaterialisedTiles::kRows *
                                             dq_columns * int64_t{sizeof(float)});
  parts.dq_nan_flags = append(parts.bytes, p.batch * p.num_heads_q * query_flags);
  parts.dkdv_nan_flags = append(parts.bytes, p.batch * p.num_heads_k * key_flags);
  return plan;
}

}  // namespace flash_attn_ext::plan
