// What a plan reports, as data and as text.
#include "kernels/plan/report.h"

#include <algorithm>
#include <initializer_list>
#include <sstream>

#include "kernels/config/key_stationary.h"
#include "kernels/config/sm80_backward.h"
#include "kernels/config/sm80_forward.h"
#include "kernels/config/sm90_forward.h"

namespace flash_attn_ext::plan {
namespace {

const char* name_of(ForwardKernel kernel) {
  switch (kernel) {
    case ForwardKernel::kCpu:
      return "tiled on the CPU";
    case ForwardKernel::kRows:
      return "one warp per row, without tensor cores";
    case ForwardKernel::kStreaming:
      return "streaming";
    case ForwardKernel::kWholeHeads:
      return "whole heads";
    case ForwardKernel::kShortBias:
      return "short heads with a bias";
    case ForwardKernel::kBiasStationary:
      return "bias-stationary";
    case ForwardKernel::kSplit:
      return "split-KV";
    case ForwardKernel::kWarpSpecialised:
      return "warp-specialised";
    case ForwardKernel::kSingleTile:
      return "warp-specialised, single tile";
  }
  return "?";
}

const char* name_of(BackwardKernels kernels) {
  switch (kernels) {
    case BackwardKernels::kCpu:
      return "tiled on the CPU";
    case BackwardKernels::kRows:
      return "one warp per row, without tensor cores";
    case BackwardKernels::kFused:
      return "fused";
    case BackwardKernels::kShortBias:
      return "short heads with a bias";
    case BackwardKernels::kBiasStationary:
      return "bias-stationary";
    case BackwardKernels::kRecompute:
      return "recompute the scores";
    case BackwardKernels::kMaterialiseInDkdv:
      return "materialise dS with dK and dV";
    case BackwardKernels::kMaterialiseInDq:
      return "materialise P and dS with dQ";
    case BackwardKernels::kKeyStationary:
      return "warp-specialised, key-stationary";
    case BackwardKernels::kTwoPass:
      return "warp-specialised, two-pass";
    case BackwardKernels::kQueryStationary:
      return "warp-specialised, query-stationary";
  }
  return "?";
}

const char* name_of(DeltaSource source) {
  switch (source) {
    case DeltaSource::kNone:
      return "";
    case DeltaSource::kOwnKernel:
      return "by its own kernel";
    case DeltaSource::kSharedKernel:
      return "within another kernel";
    case DeltaSource::kExactKernel:
      return "exact, by its own kernel";
  }
  return "?";
}

const char* name_of(BiasGradientSource source) {
  switch (source) {
    case BiasGradientSource::kNone:
      return "";
    case BiasGradientSource::kRowSums:
      return "from row sums";
    case BiasGradientSource::kSameDscores:
      return "from the same dS";
    case BiasGradientSource::kMaterialised:
      return "from the materialised dS";
    case BiasGradientSource::kKeySums:
      return "from sums of the same dS over queries";
    case BiasGradientSource::kRecomputed:
      return "from recomputed dS";
    case BiasGradientSource::kOverBatch:
      return "from dS recomputed over the batch";
    case BiasGradientSource::kRelative:
      return "of a relative-position bias, from recomputed dS";
    case BiasGradientSource::kRelativeOverBatch:
      return "of a relative-position bias, from dS recomputed over the batch";
  }
  return "?";
}

void add_workspace(Report& report, int64_t bytes, std::initializer_list<std::pair<const char*, WorkspacePart>> parts) {
  report.workspace_bytes = bytes;
  for (const auto& [name, part] : parts) {
    if (part.present()) report.workspace.emplace_back(name, part.bytes);
  }
}

class Columns {
 public:
  explicit Columns(Report& report) : columns_(report.columns) {}

  void add(const char* name, const char* value) { columns_.emplace_back(name, std::string(value)); }
  void add(const char* name, int64_t value) { columns_.emplace_back(name, value); }
  void add(const char* name, Sizes value) { columns_.emplace_back(name, value); }
  void add_if(bool value, const char* name) {
    if (value) columns_.emplace_back(name, true);
  }
  void add_above_one(const char* name, int64_t value) {
    if (value > 1) add(name, value);
  }

 private:
  std::vector<std::pair<const char*, Column>>& columns_;
};

Sizes sizes_of(const TileShape& tile) { return {tile.queries, tile.keys}; }

// head_dim_v: 0 if it is the same.
Sizes head_dims(int head_dim, int head_dim_v = 0) { return {head_dim, head_dim_v > 0 ? head_dim_v : head_dim}; }

void add_row(Columns& columns, const sm90::ForwardConfig& config, const ForwardPlan& plan) {
  columns.add_above_one("ctas_per_sm", config.ctas_per_sm);
  columns.add_if(config.ping_pong, "ping_pong");
  if (config.split_kv) columns.add("splits", plan.kv_splits);
}

bool is_portable(const ForwardPlan& plan) { return plan.kernel != ForwardKernel::kCpu && !plan.is_warp_specialised(); }
bool is_portable(const BackwardPlan& plan) {
  return plan.kernels != BackwardKernels::kCpu && !plan.is_warp_specialised();
}

void add_kernel(Report& report, const ForwardPlan& plan) {
  Columns columns(report);
  columns.add_if(is_portable(plan), "portable");
  columns.add_if(plan.row_max, "row_max");
  switch (plan.kernel) {
    case ForwardKernel::kCpu:
      if (plan.keys_per_split > 0) columns.add("keys_per_split", plan.keys_per_split);
      break;
    case ForwardKernel::kRows:
      break;
    case ForwardKernel::kWholeHeads:
      columns.add("score_mode", name_of(plan.score));
      columns.add("head_dims", head_dims(plan.head_dim));
      columns.add("tile", {sm80::kHeadsRows, sm80::kHeadsRows});
      break;
    case ForwardKernel::kShortBias:
      columns.add("score_mode", name_of(plan.score));
      columns.add("head_dims", head_dims(plan.head_dim));
      columns.add("tile", sizes_of(plan.tile));
      break;
    case ForwardKernel::kBiasStationary:
    case ForwardKernel::kSplit:
      columns.add("score_mode", name_of(plan.score));
      columns.add("head_dims", head_dims(plan.head_dim));
      columns.add("tile", sizes_of(plan.tile));
      columns.add("stages", plan.tile.stages);
      columns.add("persistent_ctas", plan.persistent_ctas);
      columns.add_if(plan.append_ctas > 0, "appends_keys");
      break;
    case ForwardKernel::kStreaming:
    case ForwardKernel::kWarpSpecialised:
    case ForwardKernel::kSingleTile:
      columns.add("score_mode", name_of(plan.score));
      columns.add_if(plan.tf32, "tf32");
      columns.add("head_dims", head_dims(plan.head_dim, plan.head_dim_v));
      columns.add("tile", sizes_of(plan.tile));
      columns.add("stages", plan.tile.stages);
      if (plan.kernel == ForwardKernel::kWarpSpecialised) add_row(columns, sm90::kForwardConfigs[plan.row], plan);
      break;
  }
}

void add_materialised(Columns& columns, const BackwardPlan::Materialised& materialised) {
  columns.add("launches", materialised.launches);
  columns.add("key_heads_per_launch", materialised.pairs_per_launch);
  columns.add_above_one("query_chunks", static_cast<int64_t>(materialised.chunks.size()));
  const bool has_key_chunks =
      std::ranges::any_of(materialised.chunks, [](const auto& chunk) { return chunk.key_chunk_tiles > 0; });
  columns.add_if(has_key_chunks, "key_chunks");
}

void add_portable(Report& report, const BackwardPlan& plan) {
  Columns columns(report);
  const bool stores_with_dkdv = plan.kernels == BackwardKernels::kMaterialiseInDkdv;
  const bool stores_with_dq = plan.kernels == BackwardKernels::kMaterialiseInDq;
  if (!stores_with_dkdv) {
    columns.add("dq_score_mode", name_of(plan.dq_score));
    columns.add("dq_head_dim", plan.dq_head_dim);
  }
  if (!stores_with_dq) {
    columns.add("dkdv_score_mode", name_of(plan.dkdv_score));
    columns.add("dkdv_head_dim", plan.dkdv_head_dim);
  }
  columns.add_if(plan.tf32, "tf32");
  columns.add_above_one("splits", plan.dq_splits);
  if (stores_with_dkdv || stores_with_dq) add_materialised(columns, plan.materialised);
}

void add_key_stationary(Report& report, const BackwardPlan& plan) {
  Columns columns(report);
  columns.add("score_mode", name_of(plan.dkdv_score));
  columns.add("head_dims", head_dims(plan.dkdv_head_dim));
  columns.add("tile", {LoopOrder::kQueries, LoopOrder::kKeys});
  columns.add_if(plan.order.cyclic, "cyclic");
  columns.add("phases", int64_t{1} << plan.order.log2_phases);
  columns.add_above_one("dq_accumulators", int64_t{1} << plan.order.log2_accumulators);
  columns.add_above_one("group_shares", plan.order.kv_group_shares);
  if (plan.query_chunks.present()) {
    columns.add("launches", attention::ceil_div(plan.order.pairs, plan.pairs_per_launch) * plan.query_chunks.count);
    columns.add("key_heads_per_launch", plan.pairs_per_launch / plan.order.kv_group_shares);
    columns.add("query_chunks", plan.query_chunks.count);
  }
  columns.add_if(sm90::kKeyStationaryConfigs[plan.row].pre_signals_dq, "pre_signals_dq");
  columns.add_if(sm90::kKeyStationaryConfigs[plan.row].adds_statistics, "adds_statistics");
}

void add_kernels(Report& report, const BackwardPlan& plan) {
  Columns columns(report);
  columns.add_if(is_portable(plan), "portable");
  switch (plan.kernels) {
    case BackwardKernels::kCpu:
    case BackwardKernels::kRows:
      break;
    case BackwardKernels::kFused:
      columns.add("score_mode", name_of(plan.dkdv_score));
      columns.add("tile", {sm80::kFusedConfigs[plan.fused_row].queries, sm80::kFusedConfigs[plan.fused_row].keys});
      break;
    case BackwardKernels::kShortBias:
      columns.add("score_mode", name_of(plan.dkdv_score));
      columns.add("head_dims", head_dims(plan.dkdv_head_dim));
      break;
    case BackwardKernels::kBiasStationary:
      columns.add("score_mode", name_of(plan.dkdv_score));
      columns.add("head_dims", head_dims(plan.dkdv_head_dim));
      columns.add("persistent_ctas", plan.persistent_ctas);
      break;
    case BackwardKernels::kRecompute:
    case BackwardKernels::kMaterialiseInDkdv:
    case BackwardKernels::kMaterialiseInDq:
      add_portable(report, plan);
      break;
    case BackwardKernels::kKeyStationary:
      add_key_stationary(report, plan);
      break;
    case BackwardKernels::kQueryStationary:
      columns.add("score_mode", name_of(plan.dq_score));
      columns.add("head_dims", head_dims(plan.dkdv_head_dim));
      columns.add("persistent_ctas", plan.persistent_ctas);
      break;
    case BackwardKernels::kTwoPass:
      columns.add("score_mode", name_of(plan.dq_score));
      columns.add("head_dims", head_dims(plan.dq_head_dim, plan.head_dim_v));
      add_materialised(columns, plan.materialised);
      break;
  }
  columns.add_above_one("dbias_splits", plan.dbias_splits);
  const bool has_exact_delta = plan.exact_delta_row != BackwardPlan::kNoExactDelta;
  columns.add_if(has_exact_delta && plan.delta != DeltaSource::kExactKernel, "slope_gradient");
}

}  // namespace

Report report(const ForwardPlan& plan) {
  Report report = {.kernel = name_of(plan.kernel)};
  add_kernel(report, plan);
  const ForwardPlan::Workspace& workspace = plan.workspace;
  add_workspace(report, workspace.bytes,
                {{"mask tiles", workspace.mask_tiles},
                 {"mask bits", workspace.mask_bits},
                 {"NaN flags", workspace.nan_flags},
                 {"tile list", workspace.tile_list},
                 {"partial O", workspace.split_rows},
                 {"row maxima and sums", workspace.split_states},
                 {"split list", workspace.split_list},
                 {"key intervals", workspace.intervals},
                 {"plan of key intervals", workspace.of_intervals},
                 {"boxes of the relative-position bias", workspace.bias_boxes},
                 {"mask as a bias", workspace.mask_as_bias},
                 {"aligned copy of the bias", workspace.aligned_bias},
                 {"maxima of the bias", workspace.bias_maxima},
                 {"work tiles that exist", workspace.existing_tiles}});
  if (plan.of_intervals) report.intervals = std::make_shared<const Report>(plan::report(*plan.of_intervals));
  return report;
}

Report report(const BackwardPlan& plan) {
  Report report = {.kernel = name_of(plan.kernels), .delta = name_of(plan.delta), .dbias = name_of(plan.dbias)};
  if (plan.exact_delta_of_sums) report.delta += ", then exact for sums of dS";
  add_kernels(report, plan);
  const BackwardPlan::Workspace& workspace = plan.workspace;
  add_workspace(report, workspace.bytes,
                {{"delta", workspace.delta},
                 {"materialised scores", workspace.materialised_scores},
                 {"mask tiles", workspace.mask_tiles},
                 {"mask bits", workspace.mask_bits},
                 {"ALiBi partial sums", workspace.alibi_partials},
                 {"partial dBias", workspace.dbias_partials},
                 {"boxes of the relative-position bias", workspace.bias_boxes},
                 {"mask as a bias", workspace.mask_as_bias},
                 {"aligned copy of the bias", workspace.aligned_bias},
                 {"float32 copy of the bias", workspace.float32_bias},
                 {"maxima of the bias", workspace.bias_maxima},
                 {"sums of dS over queries", workspace.dscore_sums},
                 {"counter of the exact delta", workspace.exact_delta_counter},
                 {"keys before padding", workspace.keys_before_padding},
                 {"dQ NaN flags", workspace.dq_nan_flags},
                 {"dK and dV NaN flags", workspace.dkdv_nan_flags},
                 {"partial dQ", workspace.dq_partials},
                 {"dQ accumulators", workspace.dq_sums},
                 {"statistics", workspace.statistics},
                 {"statistics for later keys", workspace.later_statistics},
                 {"dQ semaphores", workspace.dq_semaphores},
                 {"key tiles", workspace.key_tiles},
                 {"work tiles that exist", workspace.existing_tiles},
                 {"work counters", workspace.work_counter},
                 {"partial dK and dV", workspace.key_sums},
                 {"partial dQ of key chunks", workspace.query_sums},
                 {"arrivals", workspace.arrivals},
                 {"unrequested gradient", workspace.unwanted_gradient}});
  return report;
}

// The text of a report.

namespace {

struct PrintValue {
  std::ostringstream& words;

  void operator()(bool) const {}  // its name suffices
  void operator()(int64_t value) const { words << " " << value; }
  void operator()(const std::string& value) const { words << " " << value; }
  void operator()(const Sizes& value) const { words << " " << value.first << " x " << value.second; }
};

void print_columns(std::ostringstream& words, const Report& report) {
  const char* separator = " (";
  for (const auto& [name, value] : report.columns) {
    std::string name_in_words = name;
    std::ranges::replace(name_in_words, '_', ' ');
    words << separator << name_in_words;
    std::visit(PrintValue{words}, value);
    separator = ", ";
  }
  if (!report.columns.empty()) words << ")";
}

void print_workspace(std::ostringstream& words, const Report& report) {
  if (report.workspace_bytes == 0) {
    words << "; no workspace";
    return;
  }
  words << "; workspace " << report.workspace_bytes << " bytes";
  const char* separator = " (";
  for (const auto& [name, bytes] : report.workspace) {
    words << separator << name << " " << bytes;
    separator = ", ";
  }
  words << ")";
}

}  // namespace

std::string words_of(const Report& report) {
  std::ostringstream words;
  words << report.kernel;
  print_columns(words, report);
  if (!report.delta.empty()) words << "; delta " << report.delta;
  if (!report.dbias.empty()) words << "; dBias " << report.dbias;
  print_workspace(words, report);
  if (report.intervals) {
    words << "; batch entries whose mask leaves one key interval: " << words_of(*report.intervals);
  }
  return words.str();
}

// The JSON of a report.

namespace {

std::string quoted(const std::string& text) {
  std::string json = "\"";
  for (const char character : text) {
    if (character == '"' || character == '\\') json += '\\';
    json += character;
  }
  return json + '"';
}

struct JsonOfValue {
  std::string operator()(bool value) const { return value ? "true" : "false"; }
  std::string operator()(int64_t value) const { return std::to_string(value); }
  std::string operator()(const std::string& value) const { return quoted(value); }
  std::string operator()(const Sizes& value) const {
    std::string json = "[";
    json += std::to_string(value.first) + ", " + std::to_string(value.second);
    return json += "]";
  }
};

}  // namespace

std::string json_of(const Report& report) {
  std::string json = "{\"words\": " + quoted(words_of(report));
  const auto add = [&](const char* name, const std::string& value) { json += ", " + quoted(name) + ": " + value; };
  add("kernel", quoted(report.kernel));
  for (const auto& [name, value] : report.columns) add(name, std::visit(JsonOfValue{}, value));
  if (!report.delta.empty()) add("delta", quoted(report.delta));
  if (!report.dbias.empty()) add("dbias", quoted(report.dbias));
  add("workspace_bytes", std::to_string(report.workspace_bytes));
  std::string parts;
  for (const auto& [name, bytes] : report.workspace) {
    parts += (parts.empty() ? "" : ", ") + quoted(name) + ": " + std::to_string(bytes);
  }
  add("workspace", "{" + parts + "}");
  if (report.intervals) add("intervals", json_of(*report.intervals));
  return json + "}";
}

std::string describe(const ForwardPlan& plan) { return words_of(report(plan)); }
std::string describe(const BackwardPlan& plan) { return words_of(report(plan)); }
std::string describe(const TangentPlan& plan) { return "one kernel, head dim " + std::to_string(plan.head_dim); }

}  // namespace flash_attn_ext::plan
