#include "host/library/limits.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "host/library/library.h"
#include "kernels/plan/materialised_scores.h"

namespace flash_attn_ext::host {
namespace {

// An environment variable. Its value is a whole number from `least` to `most`, as `expected` says in words.
struct Switch {
  const char* name;
  int64_t least;
  int64_t most;
  const char* expected;
};

std::optional<int64_t> value_of(const Switch& wanted) {
  const char* text = std::getenv(wanted.name);
  if (text == nullptr || *text == '\0') return std::nullopt;
  int64_t value = 0;
  const char* end = text + std::strlen(text);
  const auto [parsed, error] = std::from_chars(text, end, value);
  TORCH_CHECK_VALUE(error == std::errc() && parsed == end && value >= wanted.least && value <= wanted.most, wanted.name,
                    " is '", text, "', expected a whole number ", wanted.expected, " to ", wanted.most,
                    "; unset it for the default");
  return value;
}

constexpr Switch kWorkspace = {.name = "FLASH_ATTN_EXT_WORKSPACE_MIB",
                               .least = 0,
                               .most = MaterialisedScores::kMostBytes >> 20,
                               .expected = "of MiB from 0 (scores are computed again)"};
constexpr Switch kSms = {
    .name = "FLASH_ATTN_EXT_MULTIPROCESSORS", .least = 1, .most = 1024, .expected = "of SMs from 1"};

}  // namespace

plan::Limits limits_of(at::Device device) {
  // These limits are those of an H200. Tensors in CPU memory have GPU plans that are only described.
  plan::Limits limits = {.max_materialised_bytes = int64_t{2} << 30, .l2_bytes = int64_t{60} << 20, .sms = 132};
  if (device.is_cuda() && has_gpu_kernels()) {
    const library::Gpu& gpu = gpu_of(device);
    limits = {.max_materialised_bytes = std::min(int64_t{2} << 30, gpu.memory_bytes / 40),
              .l2_bytes = gpu.l2_bytes,
              .sms = gpu.sms};
  }
  if (const auto mebibytes = value_of(kWorkspace)) limits.max_materialised_bytes = *mebibytes << 20;
  limits.sms = value_of(kSms).value_or(limits.sms);
  return limits;
}

void require_sms(int64_t co_resident_ctas, at::Device device) {
  if (!device.is_cuda() || co_resident_ctas == 0) return;
  const int64_t present = gpu_of(device).sms;
  TORCH_CHECK_VALUE(co_resident_ctas <= present, kSms.name, " is ", co_resident_ctas, ", but ", device, " has ",
                    present, " SMs, and blocks of this backward pass wait for each other; set it to at most ", present,
                    ", on each GPU that should give the same bits");
}

}  // namespace flash_attn_ext::host
