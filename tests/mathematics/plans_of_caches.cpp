// Which forward kernel the plan of a call with a cache names on Hopper, and that its packed heads agree with it. A plan
// looks at no tensor, so it needs no GPU.
#include <algorithm>
#include <cstdio>
#include <iterator>

#include "attention/packed_heads.h"
#include "kernels/config/sm90_forward.h"
#include "kernels/plan/plan.h"

namespace {

using flash_attn_ext::attention::ForwardParams;
using flash_attn_ext::plan::ForwardKernel;
using flash_attn_ext::plan::ForwardPlan;
namespace attention = flash_attn_ext::attention;
namespace plan = flash_attn_ext::plan;

constexpr plan::Limits kHopper = {
    .max_materialised_bytes = int64_t{2} << 30, .l2_bytes = int64_t{50} << 20, .sms = 132};

struct Call {
  const char* what;
  int64_t batch, heads, key_heads, queries, capacity, head_dim;
  bool on_hopper;
  int64_t packed_heads;
  int64_t splits = 0;
  double softcap = 0.0;
  bool wants_row_max = false;
  int64_t head_dim_v = 0;
  bool repeats_heads = false;  // q's heads have stride 0
  int64_t window = -1;
};

ForwardParams params_of(const Call& call) {
  static char memory;
  static int32_t lengths[1];
  ForwardParams p;
  p.element = attention::ElementType::kBFloat16;
  p.batch = call.batch;
  p.num_heads_q = call.heads;
  p.num_heads_k = call.key_heads;
  p.head_dim_qk = call.head_dim;
  p.head_dim_v = call.head_dim_v > 0 ? call.head_dim_v : call.head_dim;
  p.sequences = {nullptr, nullptr, call.queries, call.capacity, 0, 0};
  p.visibility = attention::Visibility{};
  p.visibility.right = 0;
  if (call.window >= 0) p.visibility.left = call.window;
  p.score_mod.scale = 0.125;
  p.score_mod.softcap = call.softcap;
  p.cache.seqlens = lengths;
  p.cache.num_entries = call.batch;
  p.q.head_stride = call.repeats_heads ? 0 : call.head_dim;
  p.row_max.data = call.wants_row_max ? &memory : nullptr;
  return p;
}

constexpr Call kCalls[] = {
    {"one query", 8, 32, 8, 1, 8192, 128, false, 4},
    {"32 packed rows", 8, 32, 8, 8, 8192, 128, false, 4},
    {"36 packed rows", 8, 32, 8, 9, 8192, 128, true, 4, 2},
    {"33 queries of heads of their own", 8, 16, 16, 33, 8192, 128, true, 1},
    {"a group of 6", 8, 12, 2, 40, 8192, 64, true, 2, 2},
    {"a group of 7", 8, 28, 4, 32, 8192, 128, false, 1},
    {"a group of 64", 8, 64, 1, 128, 8192, 64, true, 16},
    {"a chunk of a prompt", 1, 32, 8, 2048, 32768, 128, true, 4},
    {"a chunk that leaves SMs idle", 1, 32, 8, 256, 32768, 128, true, 4, 2},
    {"head dim 256", 1, 16, 8, 4096, 8192, 256, true, 1},
    {"head dim 256 and few tiles", 1, 16, 8, 128, 8192, 256, true, 1, 8},
    {"short caches", 8, 32, 8, 40, 48, 128, true, 4},
    {"heads broadcast", 8, 32, 8, 64, 8192, 128, true, 1, 0, 0.0, false, 0, true},
    {"a head dim of v that is no multiple of 8", 8, 32, 8, 64, 8192, 128, true, 1, 0, 0.0, false, 60},
    {"a window that leaves keys for two splits", 1, 16, 1, 40, 8192, 128, true, 16, 3, 0.0, false, 0, false, 900},
    {"two slices of v", 2, 32, 32, 64, 8192, 256, true, 1, 0, 0.0, false, 512},
    {"a softcap", 1, 32, 8, 2048, 8192, 128, false, 4, 0, 20.0},
    {"row_max", 1, 32, 8, 2048, 8192, 128, false, 4, 0, 0.0, true},
    {"head dim 576", 1, 128, 1, 256, 8192, 576, false, 1, 0, 0.0, false, 512},
};

int check(const Call& call) {
  const ForwardParams p = params_of(call);
  const ForwardPlan plan = plan::plan_forward_sm90(p, kHopper);
  const bool on_hopper = plan.kernel == ForwardKernel::kWarpSpecialised;
  bool right = on_hopper == call.on_hopper && attention::num_packed_heads(p) == call.packed_heads;
  if (on_hopper) {
    const auto& row = flash_attn_ext::sm90::kForwardConfigs[plan.row];
    const int64_t splits = row.split_kv ? plan.kv_splits : 0;
    right = right && row.kv_cache && splits == call.splits && splits != 1 &&
            (row.may_pack_heads() || call.packed_heads == 1);
    if (!right) std::printf("%s: %d splits\n", call.what, static_cast<int>(splits));
  }
  if (!right) {
    std::printf("%s: %s, %d packed heads\n", call.what, on_hopper ? "Hopper's kernel" : "a portable kernel",
                static_cast<int>(attention::num_packed_heads(p)));
  }
  return right ? 0 : 1;
}

}  // namespace

int main() {
  int wrong = 0;
  for (const Call& call : kCalls) wrong += check(call);
  return wrong;
}
