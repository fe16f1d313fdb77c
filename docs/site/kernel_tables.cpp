// Prints the tables of kernels as JSON for kernel_tables.py: a row is an object on a line of its own. The structured
// bindings name every column of a table, so that one that is added there has to be added here.
#include <cstdio>
#include <initializer_list>
#include <utility>

#include "kernels/config/bias_stationary.h"
#include "kernels/config/key_stationary.h"
#include "kernels/config/sm80_backward.h"
#include "kernels/config/sm80_forward.h"
#include "kernels/config/sm90_forward.h"
#include "kernels/config/two_pass.h"

namespace {

using namespace flash_attn_ext;

using Columns = std::initializer_list<std::pair<const char*, int>>;

// As `explain` calls it (kernels/plan/report.cpp).
// table: its name in the documents.
void print_row(const char* table, ScoreMode score, Columns columns) {
  std::printf("{\"table\": \"%s\", \"score\": \"%s\"", table, name_of(score));
  for (const auto& [name, value] : columns) std::printf(", \"%s\": %d", name, value);
  std::printf("}\n");
}

void print_sm90_forward() {
  for (const sm90::ForwardConfig& config : sm90::kForwardConfigs) {
    const auto& [dims, score, warpgroups, block_n, q_stages, kv_stages, ctas_per_sm, ping_pong, intra_overlap, split_kv,
                 tma_store, early_lse, early_q_release, late_pv_wait, unmasked_loop, rounded_sums, row_max, kv_cache,
                 later_keys] = config;
    print_row("sm90 forward", score,
              {{"qk", dims.qk},
               {"v", dims.v},
               {"block_m", config.block_m()},
               {"block_n", block_n},
               {"warpgroups", warpgroups},
               {"q_stages", q_stages},
               {"kv_stages", kv_stages},
               {"ctas_per_sm", ctas_per_sm},
               {"ping_pong", ping_pong},
               {"intra_overlap", intra_overlap},
               {"split_kv", split_kv},
               {"tma_store", tma_store},
               {"early_lse", early_lse},
               {"early_q_release", early_q_release},
               {"late_pv_wait", late_pv_wait},
               {"unmasked_loop", unmasked_loop},
               {"rounded_sums", rounded_sums},
               {"row_max", row_max},
               {"kv_cache", kv_cache},
               {"later_keys", later_keys},
               {"registers", sm90::forward_registers(config).consumer}});
  }
  for (const sm90::SingleTileConfig& config : sm90::kSingleTileConfigs) {
    const auto& [dims, score, block_n, warpgroups, kv_stages, q_stages, parts, intra_overlap] = config;
    print_row("sm90 single tile", score,
              {{"qk", dims.qk},
               {"v", dims.v},
               {"block_n", block_n},
               {"warpgroups", warpgroups},
               {"kv_stages", kv_stages},
               {"q_stages", q_stages},
               {"parts", parts},
               {"intra_overlap", intra_overlap},
               {"registers", sm90::single_tile_registers(config).consumer}});
  }
}

void print_sm90_backward() {
  for (const sm90::KeyStationaryConfig& config : sm90::kKeyStationaryConfigs) {
    const auto& [dims, tile, score, pre_signals_dq, adds_statistics, chunks_queries, hides_keys, sums_dscores] = config;
    const auto& [q_stages, kv_stages, keys_in_registers, dq_columns, producer_registers, key_registers, dq_registers] =
        tile;
    print_row("sm90 backward tiles", ScoreMode::kScaleOnly,
              {{"qk", dims.qk},
               {"v", dims.v},
               {"q_stages", q_stages},
               {"kv_stages", kv_stages},
               {"keys_in_registers", keys_in_registers},
               {"dq_columns", dq_columns},
               {"producer_registers", producer_registers},
               {"key_registers", key_registers},
               {"dq_registers", dq_registers}});
    print_row("sm90 backward", score,
              {{"qk", dims.qk},
               {"v", dims.v},
               {"pre_signals_dq", pre_signals_dq},
               {"adds_statistics", adds_statistics},
               {"chunks_queries", chunks_queries},
               {"hides_keys", hides_keys},
               {"sums_dscores", sums_dscores}});
  }
  for (const sm90::TwoPassConfig& config : sm90::kTwoPassConfigs) {
    const auto& [dims, score, k_stages, v_stages, dp_ahead, dq_from_tiles] = config;
    print_row("sm90 two-pass", score,
              {{"qk", dims.qk},
               {"v", dims.v},
               {"k_stages", k_stages},
               {"v_stages", v_stages},
               {"dp_ahead", dp_ahead},
               {"dq_from_tiles", dq_from_tiles},
               {"producer_registers", config.producer_registers()},
               {"registers", config.consumer_registers()}});
  }
}

void print_sm80() {
  for (const sm80::ForwardConfig& config : sm80::kForwardConfigs) {
    const auto& [element_bytes, head_dim, score, tile, repairs_in_kernel, for_few_queries, unmasked_by_warp] = config;
    const auto& [queries, keys, warps, columns, blocks, stages] = tile;
    print_row("sm80 forward", score,
              {{"element_bytes", element_bytes},
               {"qk", head_dim},
               {"block_m", queries},
               {"block_n", keys},
               {"warps", warps},
               {"slices", num_slices(head_dim, columns)},
               {"ctas_per_sm", blocks},
               {"stages", stages},
               {"repairs_in_kernel", repairs_in_kernel},
               {"for_few_queries", for_few_queries},
               {"unmasked_by_warp", unmasked_by_warp}});
  }
  for (const sm80::BiasStationaryConfig& config : sm80::kBiasStationaryConfigs) {
    const auto& [head_dim, score, tile, ctas_per_sm_backward] = config;
    print_row("sm80 bias-stationary", score,
              {{"qk", head_dim},
               {"block_m", tile.queries},
               {"block_n", tile.keys},
               {"warps", tile.warps},
               {"stages", tile.stages},
               {"ctas_per_sm", tile.ctas_per_sm},
               {"ctas_per_sm_backward", ctas_per_sm_backward}});
  }
  for (const sm80::DqConfig& config : sm80::kDqConfigs) {
    const auto& [element_bytes, head_dim, score, tile, divides_keys, stores_scores, one_key_tile] = config;
    const auto& [queries, keys, warps, columns, blocks, stages] = tile;
    print_row("sm80 dQ", score,
              {{"element_bytes", element_bytes},
               {"qk", head_dim},
               {"block_m", queries},
               {"block_n", keys},
               {"warps", warps},
               {"slices", num_slices(head_dim, columns)},
               {"ctas_per_sm", blocks},
               {"stages", stages},
               {"divides_keys", divides_keys},
               {"stores_p_and_ds", stores_scores},
               {"one_key_tile", one_key_tile}});
  }
  for (const sm80::DkdvConfig& config : sm80::kDkdvConfigs) {
    const auto& [element_bytes, head_dim, score, tile, stores_scores, one_query_tile] = config;
    const auto& [keys, queries, warps, stages, columns, both, blocks] = tile;
    print_row("sm80 dK/dV", score,
              {{"element_bytes", element_bytes},
               {"qk", head_dim},
               {"block_m", keys},
               {"block_n", queries},
               {"warps", warps},
               {"slices", num_slices(head_dim, columns)},
               {"ctas_per_sm", blocks},
               {"stages", stages},
               {"both", both},
               {"stores_ds", stores_scores},
               {"one_query_tile", one_query_tile}});
  }
}

}  // namespace

int main() {
  print_sm90_forward();
  print_sm90_backward();
  print_sm80();
  return 0;
}
