// Descriptions of GPUs that the library keeps, and for which GPUs it has code. Ends with how much of it is wrong.
#include <chrono>
#include <cstdio>
#include <cstring>
#include <future>

#include "library/gpu_code.h"
#include "library/gpu_descriptions.h"

namespace {

using flash_attn_ext::library::code_for;
using flash_attn_ext::library::Gpu;
using flash_attn_ext::library::GpuDescriptions;

int num_wrong = 0;

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n", what);
  ++num_wrong;
}

void check_descriptions() {
  static GpuDescriptions gpus;
  int num_asked = 0;
  const auto answer = [&](int status, int major) {
    return [&num_asked, status, major] {
      ++num_asked;
      return Gpu{.status = status, .major = major};
    };
  };
  expect(gpus.of(3, answer(802, 0)).status == 802, "a failure is returned");
  expect(gpus.of(3, answer(35, 0)).status == 35, "after a failure the next call asks again");
  expect(gpus.of(3, answer(0, 9)).major == 9, "and gets the GPU once there is one");
  expect(gpus.of(3, answer(35, 0)).major == 9 && num_asked == 3, "a GPU is kept");
  expect(gpus.of(4, answer(0, 8)).major == 8 && gpus.of(3, answer(0, 1)).major == 9, "each device has its own");
}

void check_that_devices_do_not_wait_for_each_other() {
  static GpuDescriptions gpus;
  std::promise<void> asked, may_answer;
  const auto slow = std::async(std::launch::async, [&] {
    gpus.of(0, [&] {
      asked.set_value();
      may_answer.get_future().wait();
      return Gpu{.major = 8};
    });
  });
  asked.get_future().wait();
  const auto quick = std::async(std::launch::async, [&] { return gpus.of(1, [] { return Gpu{.major = 9}; }).major; });
  const bool waits = quick.wait_for(std::chrono::seconds(20)) != std::future_status::ready;
  may_answer.set_value();
  expect(!waits, "a device is described while another one is asked");
}

bool has(const char* expected, int major, int minor, const char* archs) {
  const char* code = code_for(major, minor, archs);
  return code == nullptr || expected == nullptr ? code == expected : std::strcmp(code, expected) == 0;
}

void check_code() {
  constexpr const char* kMachineCode = "machine code";
  constexpr const char* kPtx = "PTX";
  expect(has(kMachineCode, 8, 0, "8.0;9.0a") && has(kMachineCode, 8, 9, "8.0;9.0a"), "it runs on later minor versions");
  expect(has(kMachineCode, 9, 0, "8.0;9.0a"), "9.0a is for 9.0");
  expect(has(kMachineCode, 9, 0, "8.0+PTX;9.0a"), "machine code comes before PTX");
  expect(has(nullptr, 8, 0, "8.6"), "machine code does not run on earlier minor versions");
  expect(has(nullptr, 10, 0, "8.0;9.0a"), "machine code does not run on another major version");
  expect(has(kPtx, 10, 0, "8.0;9.0a+PTX") && has(kPtx, 12, 1, "8.0+PTX"), "PTX is for all later GPUs");
  expect(has(nullptr, 8, 0, "9.0a+PTX") && has(nullptr, 9, 0, "10.0+PTX"), "PTX is not for earlier ones");
  expect(has(kPtx, 8, 0, "8.6+PTX"), "PTX before 9.0 is that of 8.0");
  expect(has(kMachineCode, 12, 1, "12.0") && has(nullptr, 12, 0, "12.1"), "a major version may have two digits");
  expect(has(nullptr, 9, 0, ""), "a library without CUDA has none");
}

}  // namespace

int main() {
  check_descriptions();
  check_that_devices_do_not_wait_for_each_other();
  check_code();
  return num_wrong;
}
